"Training that is killed, finds its checkpoints damaged, is sent to the wrong folder, or diverges."
import hashlib
import os
import random
import shutil
import signal
import stat
import time
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from fastai.callback.core import Callback
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.losses import CrossEntropyLossFlat
from sklearn.datasets import load_digits

from kshot_nas.callbacks import phased_opt
from kshot_nas.learner import kshot_learner
from kshot_nas.tiny import tiny_supernet

pytestmark = pytest.mark.usefixtures('one_thread')

class Jittered(list):
    "Pairs of image and label, augmented with draws from every generator that a user's transform might draw from"
    def __getitem__(self, i):
        x,y = super().__getitem__(i)
        return x.roll(random.choice((-1,0,1)), -1)*np.random.uniform(0.9, 1.1) + 0.1*torch.randn(x.shape),y

def learner(classes=10, **kwargs):
    x,y = load_digits(return_X_y=True)
    x,y = torch.tensor(x).float().view(-1,1,8,8)/8-1,torch.tensor(y) % classes
    dsets = [Jittered(zip(x[s], y[s])) for s in (slice(72), slice(72, 104))]
    dls = DataLoaders.from_dsets(*dsets, bs=16, num_workers=0, device='cpu', drop_last=False)
    dls.c = classes
    return kshot_learner(dls, tiny_supernet, **{**dict(k=2, warmup=1, nf=4, widths=True, n_paths=4, loss_func=CrossEntropyLossFlat()), **kwargs})

def fit(learn, n_epoch=3, **kwargs):
    with learn.no_bar(), learn.no_logging(): learn.fit_kshot(n_epoch, lr=0.1, **kwargs)
    return learn

def result(learn):
    "What two runs must have in common to be the same: digests of the weights of items and codes, and what was recorded"
    def digest(tensors): return hashlib.sha256(b''.join(t.numpy().tobytes() for t in tensors)).hexdigest()
    return dict(items=digest(learn.net.state_dict().values()), codes=digest(learn.coder.state_dict().values()),
                steps=[str(o) for o in learn.code_recorder.steps], followed=digest(learn.code_recorder.codes))

def epoch_of(path): return int(path.name[6:11])
def checkpoints(folder): return sorted(folder.glob('epoch_*.pt'))
def newest(folder): return max(map(epoch_of, checkpoints(folder)), default=0)
def content(folder): return {p.name: p.read_bytes() for p in folder.iterdir()}

# In processes of their own ---------------------------------------------------------------------------------------------------

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
    for seed in seeds: conn.send(('result', result(fit(learner(seed=seed), 16, checkpoint=folder, keep=2, cbs=Tell(conn)))))

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

def test_killed_and_restarted(never_killed, tmp_path):
    rng,lost = random.Random(0),[]
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
        elif halt[0] == 'unlink': assert len(checkpoints(tmp_path)) == 3
        else:
            assert [epoch_of(p) for p in tmp] == [done+1]
            assert (tmp[0].stat().st_size < 0.6*checkpoints(tmp_path)[-1].stat().st_size) == (halt[0] == 'fsync')
    assert sum(n > 0 for n in lost) >= 2, f'hardly any process was killed in the middle of an epoch: {lost}'
    assert tmp and 0 < done < 16
    with training(tmp_path) as run: (res,),epochs = finish(*run)
    assert epochs == list(range(done, 16)) and res == never_killed
    assert sorted(tmp_path.iterdir()) == checkpoints(tmp_path) and [epoch_of(p) for p in checkpoints(tmp_path)] == [15, 16]

# In this process -------------------------------------------------------------------------------------------------------------

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
    return folder,result(fit(learner(), checkpoint=folder))

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
    learn = fit(learner(), checkpoint=folder, cbs=seen)
    assert [bad.name in o.getMessage() for o in caplog.records if o.levelname == 'WARNING' and o.name.startswith('kshot_nas')] == [True]
    assert seen.epochs == [2], 'it should have gone on from the checkpoint before'
    assert result(learn) == whole[1]
    assert not (folder.parent/'witness').exists(), 'code from a checkpoint was executed'

@pytest.mark.parametrize('other,difference', [(dict(k=3), 'k: 2 there, 3 here'), (dict(seed=1), 'seed: 0 there, 1 here'),
                                              (dict(classes=5), 'outputs: 10 there, 5 here'), (dict(widths=False), 'space: ')], ids=['k', 'seed', 'classes', 'space'])
def test_other_configuration_is_refused(other, difference, folder):
    files,learn,seen = content(folder),learner(**other),Epochs()
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
    with pytest.raises((OSError, ValueError), match=str(path)): fit(learner(), checkpoint=path/below, cbs=seen)
    assert not seen.batches and content(tmp_path) == {'file': b'mine'}

@pytest.mark.parametrize('it,phase', [(2, 'items'), (3, 'codes')])
def test_loss_that_is_not_finite(it, phase, whole, tmp_path):
    with pytest.raises(FloatingPointError) as e: fit(learner(), checkpoint=tmp_path, cbs=Break(1, it))
    for part in ('smaller learning rate', 'clip', 'epoch 1', f'batch {it}', phase): assert part in str(e.value)
    good, = checkpoints(tmp_path)
    assert epoch_of(good) == 1
    learn = fit(learner(), checkpoint=tmp_path, cbs=(seen := Epochs()))
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
    learn = learner()
    with pytest.raises(KeyboardInterrupt): fit(learn, checkpoint=tmp_path, cbs=Stop(event, 1, it))
    assert result(fit(learn, checkpoint=tmp_path)) == whole[1]

def test_retry_and_validate_after_a_loss_that_is_not_finite():
    learn = learner()
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
    with pytest.raises(FloatingPointError): fit(learner(), checkpoint=tmp_path, keep=1, cbs=BadGradient())
    for p in checkpoints(tmp_path): assert all(o.isfinite().all() for o in torch.load(p, weights_only=True)['model'].values()), p.name
    fit(learner(), checkpoint=tmp_path, keep=1)         # it recovers

def test_finished_run_has_its_records(whole, folder):
    assert result(fit(learner(), checkpoint=folder)) == whole[1]

def test_resume_with_a_tracker(tmp_path, folder):
    checkpoints(folder)[-1].unlink()
    learn = learner(path=tmp_path)
    with learn.no_bar(): learn.fit_kshot(3, lr=0.1, checkpoint=folder, cbs=SaveModelCallback(monitor='valid_loss'))

def test_damaged_newest_does_not_push_out_new_ones(tmp_path):
    class Look(Callback):
        order,names = 95,[]
        def after_epoch(self): self.names.append([epoch_of(p) for p in checkpoints(tmp_path)])
    with pytest.raises(KeyboardInterrupt): fit(learner(), 6, checkpoint=tmp_path, keep=1, cbs=Stop('after_batch', 4, 1))
    bad, = checkpoints(tmp_path)
    bad.write_bytes(bad.read_bytes()[:1000])
    fit(learner(), 6, checkpoint=tmp_path, keep=1, cbs=(look := Look()))
    assert all(e+1 in names for e,names in enumerate(look.names)), look.names

@pytest.mark.parametrize('kwargs', [dict(seed=np.int64(0)), dict(alpha=np.float64(1.))], ids=str)
def test_numpy_settings(kwargs, folder, whole, caplog, tmp_path):
    fit(learner(**kwargs), checkpoint=tmp_path/'a')
    checkpoints(tmp_path/'a')[-1].unlink()
    fit(learner(**kwargs), checkpoint=tmp_path/'a', cbs=(seen := Epochs()))
    assert seen.epochs == [2]

@pytest.mark.parametrize('path', ['/proc/self', '/sys'])
def test_unwritable_folder_that_exists(path):
    seen = Epochs()
    with pytest.raises((OSError, ValueError), match=path): fit(learner(), checkpoint=path, cbs=seen)
    assert not seen.batches

def test_another_size_of_supernet_is_refused(folder):
    learn = learner(nf=8)
    before = [p.clone() for p in learn.model.state_dict().values()]
    with pytest.raises(ValueError, match='belongs to another run'): fit(learn, checkpoint=folder)
    for a,b in zip(before, learn.model.state_dict().values()): assert torch.equal(a, b)

def test_another_optimizer_is_refused(folder):
    checkpoints(folder)[-1].unlink()
    with pytest.raises(ValueError): fit(learner(opt_func=partial(phased_opt, items=lambda p, lr: torch.optim.Adam(p, lr=lr))), checkpoint=folder)

@pytest.mark.parametrize('keep', [0, -1])
def test_keep_is_checked(keep, tmp_path):
    with pytest.raises(ValueError, match='keep'): fit(learner(), checkpoint=tmp_path, keep=keep)

def test_gradient_accumulation_across_epochs(tmp_path):
    acc = lambda: GradientAccumulation(48)
    whole = result(fit(learner(), checkpoint=tmp_path, cbs=acc()))
    checkpoints(tmp_path)[-1].unlink()
    assert result(fit(learner(), checkpoint=tmp_path, cbs=acc())) == whole

def test_right_keys_wrong_content(folder, caplog):
    checkpoints(folder)[-1].unlink()
    put(folder, dict(model={}, opt={}, epoch=3, config=None))
    fit(learner(), checkpoint=folder, cbs=(seen := Epochs()))
    assert seen.epochs == [2]
