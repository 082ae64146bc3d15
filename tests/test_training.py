"Training that is killed, finds damaged checkpoints, diverges, runs on two processes or for long, on data as users have them."
import gc
import hashlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import stat
import time
import zipfile
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fastai.callback.core import Callback
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.losses import CrossEntropyLossFlat
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from kshot_nas.optimizer import phased_opt
from kshot_nas.recorder import CodeRecorder
from kshot_nas.data import fixed_batches
from kshot_nas.cost import CostTable
from kshot_nas.learner import kshot_learner
from kshot_nas.rank import kendall_tau, rank_report
from kshot_nas.space import Arch
from kshot_nas.supernet import OpChoice, Supernet, WidthChoice
from kshot_nas.tiny import tiny_supernet

pytestmark = pytest.mark.usefixtures('one_thread')

X,Y = load_digits(return_X_y=True)
X,Y = torch.tensor(X).float().view(-1,1,8,8)/8-1,torch.tensor(Y)

class Jittered(list):
    "Pairs of image and label, augmented with draws from every generator that a user's transform might draw from"
    def __getitem__(self, i):
        x,y = super().__getitem__(i)
        return x.roll(random.choice((-1,0,1)), -1)*np.random.uniform(0.9, 1.1) + 0.1*torch.randn(x.shape),y

def data(x=X, y=Y, n=48, n_valid=40, bs=16, valid_bs=None, classes=10, kind=list):
    dsets = [kind(zip(x[s], y[s])) for s in (slice(n), slice(n, n+n_valid))]
    dls = DataLoaders.from_dsets(*dsets, bs=bs, num_workers=0, device='cpu', drop_last=False)
    if valid_bs: dls.loaders[1] = dls.valid.new(bs=valid_bs)
    dls.c = classes
    return dls

def learner(dls=None, net=tiny_supernet, **kwargs):
    ours = dict(k=2, warmup=0, n_paths=4, loss_func=CrossEntropyLossFlat(), **({} if isinstance(net, Supernet) else dict(nf=4)))
    return kshot_learner(data() if dls is None else dls, net, **{**ours, **kwargs})

def jittered(classes=10, **kwargs):
    "A learner with random augmentation, that has a warm-up and widths"
    dls = data(y=Y % classes, n=72, n_valid=32, classes=classes, kind=Jittered)
    return learner(dls, **{**dict(warmup=1, widths=True), **kwargs})

def fit(learn, n_epoch=3, lr=0.1, **kwargs):
    with learn.no_bar(), learn.no_logging(): learn.fit_kshot(n_epoch, lr=lr, **kwargs)
    return learn

short = partial(fit, n_epoch=2, lr=0.05)

def result(learn):
    "What two runs must have in common to be the same: digests of the weights of items and codes, and what was recorded"
    def digest(tensors): return hashlib.sha256(b''.join(t.numpy().tobytes() for t in tensors)).hexdigest()
    return dict(items=digest(learn.net.state_dict().values()), codes=digest(learn.coder.state_dict().values()),
                steps=[str(o) for o in learn.code_recorder.steps], followed=digest(learn.code_recorder.codes))

def epoch_of(path): return int(path.name[6:11])
def checkpoints(folder): return sorted(folder.glob('epoch_*.pt'))
def newest(folder): return max(map(epoch_of, checkpoints(folder)), default=0)
def content(folder): return {p.name: p.read_bytes() for p in folder.iterdir()}

# Killed, in processes of their own ---------------------------------------------------------------------------------------------------

class Tell(Callback):
    "Tells of every event, and in which epoch it happens"
    order = 300
    def __init__(self, conn): self.conn = conn
    def __call__(self, event_name): self.conn.send((event_name, getattr(self.learn, 'epoch', 0)))

def halt_in(conn, name, count):
    "Let call number `count` of `os.fsync`, `os.replace` or `Path.unlink` on a checkpoint wait to be killed; a file to be synced is cut in half before"
    owner = Path if name == 'unlink' else os
    real,calls = getattr(owner, name),[]
    def wait(*args, **kwargs):
        if stat.S_ISREG(os.fstat(args[0]).st_mode) if name == 'fsync' else str(args[-1]).endswith('.pt'): calls.append(args)
        if len(calls) == count:
            if name == 'fsync': os.ftruncate(args[0], os.fstat(args[0]).st_size//2)
            conn.send(('halted', name))
            time.sleep(60)
        return real(*args, **kwargs)
    setattr(owner, name, wait)

def train(conn, folder, seeds, halt):
    torch.set_num_threads(1)
    if halt: halt_in(conn, *halt)
    for seed in seeds: conn.send(('result', result(fit(jittered(seed=seed), 16, checkpoint=folder, keep=2, cbs=Tell(conn)))))

@contextmanager
def training(folder=None, seeds=(0,), halt=None, method='forkserver'):
    "A process that trains, and what it tells, to the last word if it is killed"
    ctx = get_context(method)
    ours,theirs = ctx.Pipe(duplex=False)
    proc = ctx.Process(target=train, args=(theirs, folder, seeds, halt), daemon=True)
    def told():
        while True:
            try: yield ours.recv()
            except (EOFError, OSError): return          # its end, or its end in the middle of a word
    proc.start()
    theirs.close()
    try: yield proc,told()
    finally: proc.kill(); proc.join(); ours.close()

def finish(proc, told):
    "The results of a process that is let run to its end, and the epochs it has trained"
    told = list(told)
    proc.join()
    assert proc.exitcode == 0
    return [o for what,o in told if what == 'result'],[o for what,o in told if what == 'before_train']

@pytest.fixture(scope='module')
def processes():
    "A server that imports what is slow to import once, and then forks off processes"
    with pytest.MonkeyPatch.context() as m:
        m.setenv('OMP_NUM_THREADS', '1')
        m.setenv('PYTHONWARNINGS', 'ignore')
        get_context('forkserver').set_forkserver_preload(['kshot_nas.learner', 'kshot_nas.tiny', 'sklearn.datasets', 'torch._dynamo'])
        yield m

@pytest.fixture(scope='module')
def never_killed(processes, tmp_path_factory):
    "The result of a run that nothing happened to"
    with training(tmp_path_factory.mktemp('whole')) as run: (res,),_ = finish(*run)
    return res

def test_processes_agree(never_killed, processes):
    processes.setenv('PYTHONHASHSEED', '42')
    with training(seeds=(0, 1), method='spawn') as run: (same,other),_ = finish(*run)       # a fresh interpreter, and no checkpoints
    assert same == never_killed
    for what in same: assert other[what] != same[what], f'another seed, but the same {what}'

def test_killed_and_restarted(never_killed, tmp_path, rng):
    lost = []
    for halt in (None, None, ('fsync', 2), None, None, ('unlink', 1), None, None, None, ('replace', 2)):
        before,heard = newest(tmp_path),[]
        after,delay = rng.randrange(10, 100),rng.uniform(0, 0.02)               # events (an epoch has about 70) and seconds
        with training(tmp_path, halt=halt) as (proc,told):
            for o in told:
                heard.append(o)
                if o == ('halted', halt[0]) if halt else sum(epoch >= before for _,epoch in heard) == after: break
            if not halt: time.sleep(delay)
            proc.kill()
            heard += told
            proc.join()
            assert proc.exitcode == -signal.SIGKILL
        assert next(epoch for what,epoch in heard if what == 'before_train') == before, 'it should have gone on from the newest checkpoint'
        done,tmp = newest(tmp_path),list(tmp_path.glob('*.tmp'))
        if not halt: lost.append(heard.count(('after_step', done)))             # steps that have to be done again
        elif halt[0] == 'unlink': assert len(checkpoints(tmp_path)) > 2             # one too many, or two if the kill before came here, too
        else:
            assert [epoch_of(p) for p in tmp] == [done+1]
            assert zipfile.is_zipfile(tmp[0]) == (halt[0] != 'fsync')               # cut in half, or whole
    assert sum(n > 0 for n in lost) >= 2, f'hardly any process was killed in the middle of an epoch: {lost}'
    assert tmp and 0 < done < 16
    with training(tmp_path) as run: (res,),epochs = finish(*run)
    assert epochs == list(range(done, 16)) and res == never_killed
    assert sorted(tmp_path.iterdir()) == checkpoints(tmp_path) and [epoch_of(p) for p in checkpoints(tmp_path)] == [15, 16]

# Stopped, damaged or misdirected -------------------------------------------------------------------------------------------------------------

class Epochs(Callback):
    "Notes which epochs are trained, and how many batches"
    def __init__(self): self.epochs,self.batches = [],0
    def before_train(self): self.epochs.append(self.epoch)
    def before_batch(self): self.batches += self.training

class Break(Callback):
    "Makes the images of one batch infinite"
    order = -100
    def __init__(self, epoch, it): self.at = epoch,it
    def before_batch(self):
        if self.training and (self.epoch, self.iter) == self.at: self.learn.xb = (self.xb[0]*float('inf'),)

@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "The folder of a run of three epochs, and its result"
    folder = tmp_path_factory.mktemp('run')
    return folder,result(fit(jittered(), checkpoint=folder))

@pytest.fixture
def folder(whole, tmp_path): return Path(shutil.copytree(whole[0], tmp_path/'run'))

class Payload:
    "Makes the folder `witness` when it is unpickled"
    def __init__(self, witness): self.witness = witness
    def __reduce__(self): return os.mkdir,(str(self.witness),)

def put(folder, content, save=torch.save, **kwargs):
    "Write `content` as a checkpoint of epoch 3, under a name that says the truth about it"
    save(content, folder/'new', **kwargs)
    digest = hashlib.sha256((folder/'new').read_bytes()).hexdigest()
    return (folder/'new').rename(folder/f'epoch_00003-{digest[:16]}.pt')

def truncated(newest):
    newest.write_bytes(newest.read_bytes()[:-1000])
    return newest
def empty(newest):
    newest.write_bytes(b'')
    return newest
def flipped(newest):
    data = bytearray(newest.read_bytes())
    data[len(data)//2] ^= 4
    newest.write_bytes(data)
    return newest
def foreign_text(newest):
    newest.write_text('notes of epoch 3')
    return newest
def foreign_named_right(newest):
    newest.unlink()
    return put(newest.parent, b'notes', lambda data, path: path.write_bytes(data))
def foreign_weights(newest):
    newest.unlink()
    return put(newest.parent, dict(model={'weight': torch.zeros(3)}))
def malicious(newest, **kwargs):
    state,witness = torch.load(newest, weights_only=True),newest.parent.parent/'witness'
    newest.unlink()
    path = put(newest.parent, {**state, 'steps': Payload(witness)}, **kwargs)
    torch.load(path, weights_only=False)                # it is really dangerous
    witness.rmdir()
    return path
def malicious_legacy(newest): return malicious(newest, _use_new_zipfile_serialization=False)

@pytest.mark.parametrize('spoil', [truncated, empty, flipped, foreign_text, foreign_named_right, foreign_weights, malicious, malicious_legacy])
def test_bad_checkpoint_is_passed_over(spoil, whole, folder, caplog):
    bad,seen = spoil(checkpoints(folder)[-1]),Epochs()
    learn = fit(jittered(), checkpoint=folder, cbs=seen)
    assert [bad.name in o.getMessage() for o in caplog.records if o.levelname == 'WARNING' and o.name.startswith('kshot_nas')] == [True]
    assert seen.epochs == [2], 'it should have gone on from the checkpoint before'
    assert result(learn) == whole[1]
    assert not (folder.parent/'witness').exists(), 'code from a checkpoint was executed'

others = {'k: 2 there, 3 here': dict(k=3), 'seed: 0 there, 1 here': dict(seed=1), 'outputs: 10 there, 5 here': dict(classes=5), 'space: ': dict(widths=False)}

@pytest.mark.parametrize('difference,other', others.items(), ids=['k', 'seed', 'classes', 'space'])
def test_other_configuration_is_refused(difference, other, folder):
    files,learn,seen = content(folder),jittered(**other),Epochs()
    before = [p.clone() for p in learn.model.state_dict().values()]
    with pytest.raises(ValueError, match=difference) as e: fit(learn, checkpoint=folder, cbs=seen)
    assert checkpoints(folder)[-1].name in str(e.value)
    assert 'warmup' not in str(e.value), 'it names what is not different, too'
    assert content(folder) == files and not seen.batches
    for a,b in zip(before, learn.model.state_dict().values()): assert torch.equal(a, b)

@pytest.mark.parametrize('below', ['', 'a', 'a/b'])
def test_unusable_folder_is_noticed_at_once(below, tmp_path):
    path,seen = tmp_path/'file',Epochs()
    path.write_text('mine')
    with pytest.raises((OSError, ValueError), match=str(path)): fit(jittered(), checkpoint=path/below, cbs=seen)
    assert not seen.batches and content(tmp_path) == {'file': b'mine'}

@pytest.mark.parametrize('it,phase', [(2, 'items'), (3, 'codes')])
def test_loss_that_is_not_finite(it, phase, whole, tmp_path):
    with pytest.raises(FloatingPointError) as e: fit(jittered(), checkpoint=tmp_path, cbs=Break(1, it))
    for part in ('smaller learning rate', 'clip', 'epoch 1', f'batch {it}', phase): assert part in str(e.value)
    good, = checkpoints(tmp_path)
    assert epoch_of(good) == 1
    learn = fit(jittered(), checkpoint=tmp_path, cbs=(seen := Epochs()))
    assert seen.epochs == [1, 2] and result(learn) == whole[1]

# What a run must not trip over ------------------------------------------------------------------------------------------------

class Stop(Callback):
    "An interruption by the user, at an event of a batch"
    order = 200
    def __init__(self, event, epoch, it):
        self.at = epoch,it
        setattr(self, event, self.stop)
    def stop(self):
        if self.training and (self.epoch, self.iter) == self.at: raise KeyboardInterrupt()

@pytest.mark.parametrize('event', ['after_pred', 'after_backward'])
@pytest.mark.parametrize('it', [2, 3])
def test_interrupted_and_resumed_in_the_same_learner(it, event, whole, tmp_path):
    learn = jittered()
    with pytest.raises(KeyboardInterrupt): fit(learn, checkpoint=tmp_path, cbs=Stop(event, 1, it))
    assert result(fit(learn, checkpoint=tmp_path)) == whole[1]

def test_retry_and_validate_after_a_loss_that_is_not_finite():
    learn = jittered()
    with pytest.raises(FloatingPointError): fit(learn, cbs=Break(1, 3))
    with learn.no_bar(): learn.validate()
    fit(learn)

class BadGradient(Callback):
    order = 50
    def before_step(self):
        if (self.epoch, self.iter) == (1, self.n_iter-1):
            for p in self.model.parameters():
                if p.grad is not None: p.grad.mul_(float('nan'))

def test_no_checkpoint_of_weights_that_are_not_finite(tmp_path):
    with pytest.raises(FloatingPointError): fit(jittered(), checkpoint=tmp_path, keep=1, cbs=BadGradient())
    for p in checkpoints(tmp_path): assert all(o.isfinite().all() for o in torch.load(p, weights_only=True)['model'].values()), p.name
    fit(jittered(), checkpoint=tmp_path, keep=1)         # it recovers

def test_finished_run_has_its_records(whole, folder):
    assert result(fit(jittered(), checkpoint=folder)) == whole[1]

def test_resume_with_a_tracker(tmp_path, folder):
    checkpoints(folder)[-1].unlink()
    learn = jittered(path=tmp_path)
    with learn.no_bar(): learn.fit_kshot(3, lr=0.1, checkpoint=folder, cbs=SaveModelCallback(monitor='valid_loss'))

def test_damaged_newest_does_not_push_out_new_ones(tmp_path):
    class Look(Callback):
        order,names = 95,[]
        def after_epoch(self): self.names.append([epoch_of(p) for p in checkpoints(tmp_path)])
    with pytest.raises(KeyboardInterrupt): fit(jittered(), 6, checkpoint=tmp_path, keep=1, cbs=Stop('after_batch', 4, 1))
    bad, = checkpoints(tmp_path)
    bad.write_bytes(bad.read_bytes()[:1000])
    fit(jittered(), 6, checkpoint=tmp_path, keep=1, cbs=(look := Look()))
    assert all(e+1 in names for e,names in enumerate(look.names)), look.names

@pytest.mark.parametrize('kwargs', [dict(seed=np.int64(0)), dict(alpha=np.float64(1.))], ids=str)
def test_numpy_settings(kwargs, folder, whole, caplog, tmp_path):
    fit(jittered(**kwargs), checkpoint=tmp_path/'a')
    checkpoints(tmp_path/'a')[-1].unlink()
    fit(jittered(**kwargs), checkpoint=tmp_path/'a', cbs=(seen := Epochs()))
    assert seen.epochs == [2]

@pytest.mark.skipif(not Path('/proc/self').exists(), reason='this system has no folder that even root cannot write to')
def test_unwritable_folder_that_exists():
    path,seen = '/proc/self',Epochs()
    with pytest.raises((OSError, ValueError), match=path): fit(jittered(), checkpoint=path, cbs=seen)
    assert not seen.batches

def test_another_size_of_supernet_is_refused(folder):
    learn = jittered(nf=8)
    before = [p.clone() for p in learn.model.state_dict().values()]
    with pytest.raises(ValueError, match='belongs to another run'): fit(learn, checkpoint=folder)
    for a,b in zip(before, learn.model.state_dict().values()): assert torch.equal(a, b)

def test_another_optimizer_is_refused(folder):
    checkpoints(folder)[-1].unlink()
    adam = partial(phased_opt, items=lambda p, lr: torch.optim.Adam(p, lr=lr))
    with pytest.raises(ValueError): fit(jittered(opt_func=adam), checkpoint=folder)

def test_gradient_accumulation_across_epochs(tmp_path):
    def acc(): return GradientAccumulation(48)
    whole = result(fit(jittered(), checkpoint=tmp_path, cbs=acc()))
    checkpoints(tmp_path)[-1].unlink()
    assert result(fit(jittered(), checkpoint=tmp_path, cbs=acc())) == whole

# Two processes on one machine, as `accelerate launch` starts them, over gloo on the CPU ---------------------------------------

together = '''
import sys, torch, warnings
warnings.filterwarnings('ignore')
from torch import nn
from fastai.vision.all import *
from fastai.distributed import *
from kshot_nas.learner import kshot_learner
from kshot_nas.supernet import OpChoice, Supernet

out,n_paths,bs,together = sys.argv[1],int(sys.argv[2]),int(sys.argv[3]),sys.argv[4] == 'together'

def net(k, n_in, n_out):                        # no batch norm: its statistics would depend on who sees which images
    def conv(ks): return nn.Sequential(nn.Conv2d(4, 4, ks, padding=ks//2), nn.GELU())
    ops = lambda: OpChoice({'c3': conv(3), 'c1': conv(1), 'skip': nn.Identity()})
    return Supernet(nn.Sequential(nn.Conv2d(n_in, 4, 3), nn.GELU(), ops(), ops(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, n_out)), k)

gen = torch.Generator().manual_seed(0)
x,y = torch.randn(64, 1, 8, 8, generator=gen),torch.randint(0, 3, (64,), generator=gen)
if together: order = torch.arange(64)           # the first half goes to one process, the second half to the other ...
else: order = torch.stack([torch.arange(32).view(-1, bs//2), 32+torch.arange(32).view(-1, bs//2)], 1).flatten()   # ... so here the halves take turns
dls = DataLoaders.from_dsets(list(zip(x[order], y[order])), list(zip(x[:16], y[:16])), bs=bs, num_workers=0, device='cpu', shuffle_fn=lambda idxs: idxs)
learn = kshot_learner(dls, net, k=3, n_paths=n_paths, warmup=1, n_out=3, loss_func=CrossEntropyLossFlat())
if together and rank_distrib(): nn.init.zeros_(next(learn.model.parameters()))        # a process that starts from elsewhere is brought in line
with learn.no_bar(), learn.no_logging():
    if together:
        with learn.distrib_ctx(cpu=True): learn.fit_kshot(3, lr=0.1)
    else: learn.fit_kshot(3, lr=0.1)
torch.save({**learn.model.state_dict(), 'steps': torch.tensor([s[1] == 'codes' for s in learn.code_recorder.steps])}, f'{out}/{rank_distrib()}.pt')
teardown_distrib()                              # fastai leaves the group open; a process that ends with one may abort at its exit
'''

def run_together(folder, n_proc, n_paths, bs):
    "Run the script above in `n_proc` processes; the state of each at the end"
    pytest.importorskip('accelerate')
    folder.mkdir()
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': ''}
    size = dict(WORLD_SIZE=str(n_proc), LOCAL_WORLD_SIZE=str(n_proc))
    if n_proc > 1: env |= dict(**size, MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port), ACCELERATE_USE_CPU='true')
    args = [sys.executable, '-c', together, str(folder), str(n_paths), str(bs), 'together' if n_proc > 1 else 'alone']
    def start(rank):
        ranked = {**env, **(dict(RANK=str(rank), LOCAL_RANK=str(rank)) if n_proc > 1 else {})}
        return subprocess.Popen(args, env=ranked, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    procs = [start(r) for r in range(n_proc)]
    try: outs = [p.communicate(timeout=240)[0] for p in procs]
    finally:
        for p in procs: p.kill()
    assert all(p.returncode == 0 for p in procs), '\n'.join(outs)
    return [torch.load(folder/f'{r}.pt', weights_only=True) for r in range(n_proc)]

def test_two_processes_train_as_one(tmp_path):
    "With one path per step the joined batch of both processes is the batch of one; sums in another order differ by rounding."
    (a,b),(alone,) = run_together(tmp_path/'two', 2, 1, 8),run_together(tmp_path/'one', 1, 1, 16)
    assert a['steps'].any() and not a['steps'].all()
    for n in a:
        assert torch.equal(a[n], b[n]), f'{n} differs between the processes'
        torch.testing.assert_close(a[n], alone[n], rtol=1e-3, atol=1e-5)

def test_many_paths_stay_the_same_everywhere(tmp_path):
    a,b = run_together(tmp_path/'two', 2, 4, 8)
    assert a['steps'].any()
    for n in a: assert torch.equal(a[n], b[n]), f'{n} differs between the processes'

launched = '''
import warnings; warnings.filterwarnings('ignore')
from fastai.vision.all import *
from fastai.distributed import *
from kshot_nas.study.bench import DigitsBench
from kshot_nas.learner import kshot_learner
bench = DigitsBench()
learn = kshot_learner(bench.dls(repeat=1), bench.supernet, k=2, n_paths=2, warmup=0)
with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(): learn.fit_kshot(1, lr=0.01)
print(len(learn.code_recorder.steps), 'steps')
'''

@pytest.mark.slow
def test_accelerate_launch(tmp_path):
    "That two processes train as one is tested with processes that are started in the same way"
    pytest.importorskip('accelerate')
    (tmp_path/'train.py').write_text(launched)
    options = '--cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no'.split()
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(Path(__file__).resolve().parents[1])}
    args = [sys.executable, '-m', 'accelerate.commands.launch', *options, 'train.py']
    res = subprocess.run(args, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert res.returncode == 0 and res.stdout.split()[-2:] == ['6', 'steps'], res.stderr

# For long: memory must not grow, and pace must not drop -----------------------------------------------------------------------

needs_proc = pytest.mark.skipif(not Path('/proc/self/status').exists(), reason='this system does not tell how much memory a process has')

def kilobytes():
    "Memory that this process has now"
    return next(int(l.split()[1]) for l in Path('/proc/self/status').read_text().splitlines() if l.startswith('VmRSS'))

def apart(f, *args):
    "What `f` returns in a process of its own, where nothing that others have freed can be used again"
    with get_context('spawn').Pool(1) as pool: return pool.apply(f, args)

def many_steps(n):
    "A small learner with `n` steps in an epoch"
    x,y = torch.randn(4*n+8, 1, 8, 8),torch.arange(4*n+8) % 3
    return learner(data(x, y, n=4*n, n_valid=8, bs=4, classes=3), n_paths=2, warmup=1, nf=2, n_layers=2, widths=True)

class Watch(Callback):
    "Calls a function after every epoch, and keeps what it returns"
    order = 100
    def __init__(self, f): self.f,self.marks = f,[]
    def after_epoch(self): self.marks.append(self.f())

def watched(learn, n_epoch, f, **kwargs):
    fit(learn, n_epoch, lr=0.01, cbs=(watch := Watch(f)), **kwargs)
    return watch.marks

def test_training_keeps_no_objects(tmp_path):
    "Numbers are kept of every step, and nothing that holds others: no tensor, no graph, no architecture."
    def objects():
        gc.collect()
        return len(gc.get_objects())
    n = np.diff(watched(many_steps(50), 6, objects, checkpoint=tmp_path))
    assert n[2:].max() < 40, f'{n} more objects after an epoch of 50 steps'

def test_the_mean_of_an_epoch_is_quick_after_many():
    rec = CodeRecorder()
    rec.learn = type('Learner', (), dict(epoch=9999))
    rec.steps = [(e, ('items', 'codes')[i % 2], float(e+i), 0.) for e in range(10_000) for i in range(50)]
    start = time.process_time()
    assert rec.mean() == 9999 + 24.5 and rec.mean('codes') == 9999 + 25
    assert time.process_time()-start < 0.02

def long_training(folder):
    "Memory and processor time after each of 100 epochs of 1,000 steps, with checkpoints"
    torch.set_num_threads(1)
    return watched(many_steps(1000), 100, lambda: (kilobytes(), time.process_time()), checkpoint=folder)

@needs_proc
@pytest.mark.slow
def test_a_long_training_stays_small_and_quick(tmp_path):
    memory,seconds = np.array(apart(long_training, tmp_path)).T
    assert memory[-1] < 1.1*memory[2] and memory[-1]-memory[2] < 0.5*97_000, 'more than half a kB for a step'
    pace = np.diff(seconds)
    assert np.median(pace[-10:]) < 1.5*np.median(pace[2:12]), 'epochs take longer and longer'
    assert max(p.stat().st_size for p in tmp_path.iterdir()) < 60*100_000

# On data and numbers as users have them ---------------------------------------------------------------------------------------

def works(learn, n_archs=3):
    "Trained or not, `learn` has finite weights, codes on the simplex, and evaluates as the plain networks do"
    assert all(p.isfinite().all() for p in learn.model.parameters())
    for arch in learn.space.sample(n_archs, seed=1):
        lam = learn.code(arch)
        assert (lam >= 0).all() and abs(lam.sum() - 1) < 1e-5
        plain,batches = learn.net.subnet(arch, lam).train(),learn.batches(1)
        with torch.no_grad(): loss = sum(F.cross_entropy(plain(x), y, reduction='sum') for x,y in batches)/sum(len(y) for _,y in batches)
        got = learn.eval_arch(arch)
        assert got['loss'] == pytest.approx(loss.item(), abs=2e-4) and 0 <= got['accuracy'] <= 1
    return learn

class Same(Callback):
    "All images of a batch are the same"
    order = -100
    def before_batch(self): self.learn.xb = (self.xb[0][:1].expand_as(self.xb[0]),)

class Half(Callback):
    "Autocast on a CPU"
    order = -1
    def __init__(self, dtype): self.dtype = dtype
    def before_batch(self):
        self.cast = torch.autocast('cpu', dtype=self.dtype)
        self.cast.__enter__()
    def after_pred(self): self.learn.pred = self.pred.float()
    def after_loss(self): self.cast.__exit__(None, None, None)

def test_the_learning_rate_falls_along_a_cosine():
    rates = np.array(fit(learner(), lr=0.1).recorder.lrs)
    assert len(rates) == 9 and np.allclose(rates, 0.05*(1 + np.cos(np.pi*np.arange(9)/9)))

# Half precision ----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('joint', [False, True], ids=['in turn', 'joint'])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype, joint):
    learn,whole = (short(learner(widths=True, joint=joint), cbs=cbs) for cbs in ([Half(dtype)], []))
    assert {s[1] for s in learn.code_recorder.steps} == ({'both'} if joint else {'items', 'codes'})
    for a,b in zip(learn.code_recorder.steps, whole.code_recorder.steps): assert a[:2] == b[:2] and a[2] == pytest.approx(b[2], abs=0.1)
    assert {p.dtype for p in learn.model.parameters()} == {torch.float32}
    arch = learn.space.sample(1, seed=0)[0]
    with torch.autocast('cpu', dtype=dtype): half,lam = learn.eval_arch(arch),learn.code(arch)
    assert lam.dtype == torch.float32 and half['loss'] == pytest.approx(learn.eval_arch(arch)['loss'], abs=0.05)
    works(learn)

# Batches ------------------------------------------------------------------------------------------------------------------------

def test_batches_without_variance(): works(short(learner(widths=True), cbs=Same()))

def test_one_image_per_path():
    "More paths than images: fewer paths of two images each"
    works(short(learner(data(bs=4), n_paths=16, widths=True)))

def test_classes_missing_in_a_batch():
    order = Y[:88].argsort(stable=True)                                                   # the last classes are only in validation
    works(short(learner(data(X[order], Y[order]))))
    works(short(learner(data(y=Y*0))))                                                      # one class is all there is

def pooled(norm=nn.BatchNorm2d(4), ops='ab'):
    "A small supernet with a norm of one value for each channel and image"
    choice = OpChoice({o: nn.Conv2d(1, 4, 3) for o in ops})
    return Supernet(nn.Sequential(choice, nn.AdaptiveAvgPool2d(1), norm, nn.Flatten(), nn.Linear(4, 10)), 2, in_shape=(1, 8, 8))

def test_norm_of_a_single_value():
    net = pooled()
    assert net(X[:2]).isfinite().all()
    for mode in net.train, net.eval:
        with pytest.raises(ValueError, match='a single value per channel.*at least 2 images'): mode()(X[:1])
    works(short(learner(data(bs=4), pooled(), n_paths=4)))                               # two paths of two images

def test_evaluation_in_batches_of_one():
    arch = Arch((0,1,2,3,0))
    learn = learner(data(valid_bs=1))
    with pytest.raises(ValueError, match="larger `bs` for validation, or stats='train'"): learn.eval_arch(arch)
    with pytest.raises(RuntimeError, match='larger `bs`'): learn.search(pop=4, gens=1, progress=False)
    assert learn.eval_arch(arch, stats='train')['loss'] == pytest.approx(learner().eval_arch(arch, stats='train')['loss'], abs=1e-4)
    works(learner(data(valid_bs=1), pooled(nn.LayerNorm((4, 1, 1)))), 1)            # nothing in it looks at other images

def test_no_last_batch_of_one():
    dls = data(n_valid=33)
    works(learner(dls))
    assert [len(y) for _,y in fixed_batches(dls.valid, 'cpu', bs=16)] == [17, 16]
    works(learner(data(n_valid=33), pooled()))
    assert [len(y) for _,y in learner(data(n_valid=1)).batches(1)] == [1]          # one image is one image

# Sizes --------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('k', [1, 32])
def test_few_and_many_items(k):
    learn = works(short(learner(k=k, widths=True)))
    assert {s[1] for s in learn.code_recorder.steps} == ({'items'} if k == 1 else {'items', 'codes'})

def test_a_single_operation():
    net = pooled(ops=['only'])
    learn = works(short(learner(data(), net)))
    assert learn.space.size == 1
    result = learn.search(pop=4, gens=2, progress=False)
    assert len(result.history) == 1 and result.best == Arch((0,))

def same_channels(k=2, n_in=1, n_out=10, size=8):
    cut,ops = WidthChoice((0.1, 0.2, 0.3, 1.0)),{'a': nn.Conv2d(4, 4, 1), 'b': nn.Conv2d(4, 4, 3, padding=1)}
    tail = nn.AdaptiveAvgPool2d(1),nn.Flatten(),nn.Linear(4, n_out)
    return Supernet(nn.Sequential(cut(nn.Conv2d(n_in, 4, 3)), nn.BatchNorm2d(4), OpChoice(ops), *tail), k, in_shape=(n_in, size, size))

few = dict(first_three_alike=same_channels, one_channel=partial(tiny_supernet, widths=True, nf=1), two_channels=partial(tiny_supernet, widths=True, nf=2))

@pytest.mark.parametrize('make', few.values(), ids=few)
def test_widths_of_the_same_channels(make):
    net = make(k=2)
    table,archs = CostTable(net),net.space.sample(12, seed=0)
    for arch,flops,params in zip(archs, table.flops(archs).tolist(), table.params(archs).tolist()):
        plain = net.subnet(arch, weights='fresh').eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad(): plain(X[:1])
        assert (counter.get_total_flops()//2, sum(p.numel() for p in plain.parameters())) == (flops, params)
        assert torch.allclose(net.use(arch)(X[:4]), net.subnet(arch).train()(X[:4]), atol=1e-5)

def test_channels(channels=5):
    learn = works(short(learner(data(X.repeat(1, channels, 1, 1)))))
    assert learn.net.in_shape == (channels, 8, 8) and learn.subnet(learn.space.sample(1, seed=0)[0])[0].in_channels == channels

def test_another_number_of_channels_or_size():
    with pytest.raises(ValueError, match=r'made for inputs of shape \(3, 8, 8\).*those of the data have \(1, 8, 8\)'): learner(data(), tiny_supernet(k=2, n_in=3))
    with pytest.raises(ValueError, match=r'made for inputs of shape \(1, 16, 16\)'): learner(data(), tiny_supernet(k=2, size=16))
    with pytest.raises(ValueError, match=r'inputs of shape \(3, 8, 8\); got'): tiny_supernet(k=2, n_in=3)(X[:2])
    with pytest.raises(TypeError, match='torch.float64'): learner(data(X.double()))
    learn = learner()
    learn.dls = data(F.interpolate(X, size=16))                                           # larger images later on are fine, if one means it
    works(short(learn))

# Operations ---------------------------------------------------------------------------------------------------------------------

def test_an_operation_of_another_shape():
    ops = OpChoice({'same': nn.Conv2d(4, 4, 1), 'fewer': nn.Conv2d(4, 2, 1)})
    with pytest.raises(ValueError, match=r"same shape; got \{'same': \(4, 6, 6\), 'fewer': \(2, 6, 6\)\}"):
        Supernet(nn.Sequential(nn.Conv2d(1, 4, 3), ops, nn.Conv2d(4, 4, 1)), 2, in_shape=(1, 8, 8))

def test_an_operation_that_needs_content():
    class Picky(nn.Module):
        def forward(self, x): return x*float(x.mean())                                    # can't be done without
    net = Supernet(nn.Sequential(OpChoice({'a': Picky(), 'b': nn.Identity()}), nn.Flatten(), nn.Linear(64, 10)), 2, in_shape=(1, 8, 8))
    assert net.use(Arch((0,)))(X[:2]).isfinite().all()

# Data ---------------------------------------------------------------------------------------------------------------------------

def test_duplicates():
    learn,archs = learner(),[Arch((0,1,2,3,0)), Arch((0,)*5), Arch((0,1,2,3,0)), Arch((1,)*5)]
    df = learn.eval_archs(archs, progress=False)
    assert df.index.tolist() == archs and df.iloc[0].equals(df.iloc[2])
    for f in kendall_tau, rank_report:
        with pytest.raises(ValueError, match='`pred` has a key more than once: 0-1-2-3-0. Count every architecture once'): f(df.loss, df.loss)
    once = df.loss[~df.index.duplicated()]
    assert kendall_tau(once, once) == 1

def test_no_validation_images():
    learn = learner(data(n_valid=0))
    for f in (lambda: learn.eval_arch(Arch((0,)*5))), (lambda: learn.search(pop=4, gens=1, progress=False)):
        with pytest.raises(ValueError, match='no images to evaluate on'): f()

def test_images_that_are_not_numbers():
    x = X.clone()
    x[60,0,3,3] = float('nan')
    with pytest.raises(ValueError, match='NaN or infinite values in the images to evaluate on'): learner(data(x)).eval_arch(Arch((0,)*5))
    x[3] = float('inf')
    with pytest.raises(FloatingPointError, match='is there a NaN in the data'): short(learner(data(x)))

def test_weights_that_are_not_numbers():
    learn = learner()
    with torch.no_grad(): learn.net.net[0].theta.fill_(float('nan'))
    res = learn.eval_archs([Arch((0,)*5), Arch((1,)*5)], progress=False)
    assert res.isna().all().all()                                                         # not the accuracy of always guessing the first class
    with pytest.raises(ValueError, match='not finite at 0-0-0-0-0'): kendall_tau(res.accuracy, [1, 2])

@pytest.mark.parametrize('shift', [5, -1])
def test_classes_out_of_range(shift):
    with pytest.raises(ValueError, match='but the network has 10 outputs, for classes 0 to 9'): short(learner(data(y=Y+shift)))

def test_clipped_gradients():
    "The gradient of K items is longer than that of one, so that a clip of 1 would throttle; the advice says 10"
    class Norm(Callback):
        order,norms = 200,()
        def before_step(self):
            if self.learn.phase != 'items': return
            grads = [p.grad for p in self.learn.net.parameters() if p.grad is not None]
            self.norms = [*self.norms, sum(g.square().sum() for g in grads).sqrt().item()]
    free,clipped = Norm(),Norm()
    short(learner(k=8), cbs=free)
    short(learner(k=8), cbs=[clipped, GradientClip(1.)])
    assert max(clipped.norms) < 1.01 and min(free.norms) > 2
    with pytest.raises(FloatingPointError, match=r'GradientClip\(10\.\)'): short(learner(data(X*float('inf'))))

STRIDED = """
import sys, torch
from torch import nn
from kshot_nas import layers
if 'plainly' in sys.argv: layers.KConv2d.conv = staticmethod(torch.nn.functional.conv2d)
conv = layers.to_channels_last(layers.KConv2d(12, 32, 1, stride=2, bias=False, k=2))
plain = layers.to_channels_last(nn.Sequential(nn.Conv2d(12, 32, 1, stride=2)))
for net in (conv, plain, conv.plain()) if 'plainly' not in sys.argv else (conv,):
    for _ in range(3):
        x = torch.randn(8, 12, 112, 112).contiguous(memory_format=torch.channels_last).requires_grad_()
        net(x).square().sum().backward()
print('alive')
"""

def test_strided_1x1_convolutions_keep_to_their_memory():
    "PyTorch 2.15 writes beyond it in the backward pass, channels-last; run with the argument `plainly`, this crashes"
    res = subprocess.run([sys.executable, '-W', 'ignore', '-c', STRIDED], capture_output=True, text=True)
    assert res.returncode == 0 and 'alive' in res.stdout, (res.returncode, res.stderr)
