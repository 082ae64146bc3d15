"""Training that is killed, damaged, misdirected or led astray. Run as a script, this file is the process that gets killed:

    python tests/test_training.py FOLDER SEED...    trains once per seed, with checkpoints in FOLDER unless it is -"""
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.losses import CrossEntropyLossFlat
from sklearn.datasets import load_digits

from kshot_nas.learner import kshot_learner
from kshot_nas.tiny import tiny_supernet

n_batch = 5     # in an epoch; the last one is short

class Jittered(list):
    "Pairs of image and label, augmented with draws from every generator that a user's transform might draw from"
    n_inp = 1
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

def first_epoch(lines): return next(int(o.split()[1]) for o in lines if o.startswith('before_train'))
def epoch_of(path): return int(path.name[6:11])
def checkpoints(folder): return sorted(folder.glob('epoch_*.pt'))
def content(folder): return {p.name: p.read_bytes() for p in folder.iterdir()}

# The process that gets killed ------------------------------------------------------------------------------------------------

class Say(Callback):
    "Prints every event"
    order = 300
    def __call__(self, event_name):
        state = [getattr(self.learn, o, 0) for o in ('epoch', 'iter', 'training')]
        print(event_name, *map(int, state), flush=True)

def halt_in(name, count):
    "Let call number `count` of the function `name` of `os` wait to be killed; a file to be synced is cut in half before"
    real,calls = getattr(os, name),[]
    def wait(*args):
        calls.append(args)
        if len(calls) == count:
            if name == 'fsync': os.ftruncate(args[0], os.fstat(args[0]).st_size//2)
            print('halted', flush=True)
            time.sleep(60)
        return real(*args)
    setattr(os, name, wait)

def main(folder, *seeds):
    if halt := os.environ.get('HALT_IN'): halt_in(halt, 2)
    runs = [fit(learner(seed=int(s)), 10, cbs=Say(), **({} if folder == '-' else dict(checkpoint=folder, keep=2))) for s in seeds]
    print(json.dumps([result(o) for o in runs]))

def start(*args, hash_seed=0, halt=''):
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONHASHSEED': str(hash_seed), 'PYTHONWARNINGS': 'ignore', 'HALT_IN': halt}
    return subprocess.Popen([sys.executable, __file__, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)

def finish(proc):
    "The results of a process that is let run to its end, and the events it went through"
    out,err = proc.communicate(timeout=120)
    assert proc.returncode == 0, err
    *lines,last = out.splitlines()
    return json.loads(last),lines

def kill(proc, is_time, delay=0.):
    "Kill `proc` `delay` seconds after the line that `is_time`; all the lines it has printed"
    lines = []
    with proc:
        try:
            for line in proc.stdout:
                lines.append(line)
                if is_time(len(lines), line): break
            time.sleep(delay)
        finally: proc.kill()
        lines += proc.stdout.readlines()
        assert proc.wait() == -signal.SIGKILL, 'it ended before it could be killed:\n' + proc.stderr.read()
    return lines

@pytest.fixture(scope='module')
def never_killed(tmp_path_factory):
    "One run with seed 0 that writes checkpoints; two that don't, with seeds 0 and 1, in another process"
    procs = start(tmp_path_factory.mktemp('whole'), 0, hash_seed=1),start('-', 0, 1, hash_seed=2)
    try: return [r for p in procs for r in finish(p)[0]]
    finally:
        for p in procs: p.kill()

def test_processes_agree(never_killed):
    one,other,another_seed = never_killed
    assert one == other
    for what in one: assert one[what] != another_seed[what], f'another seed, same {what}'

def test_killed_and_restarted(never_killed, tmp_path):
    rng,in_epoch = random.Random(0),0
    for halt in ('', 'fsync', '', '', 'replace'):
        newest,at = max(map(epoch_of, checkpoints(tmp_path)), default=0),rng.randrange(20, 100)       # an epoch has about 70 lines
        lines = kill(start(tmp_path, 0, halt=halt), lambda n, line: line == 'halted\n' if halt else n == at, 0. if halt else rng.uniform(0, 0.02))
        assert first_epoch(lines) == newest, 'it should have gone on from the newest checkpoint'
        if halt:
            tmp, = tmp_path.glob('*.tmp')
            done = checkpoints(tmp_path)[-1]
            assert lines[-1] == 'halted\n' and (epoch_of(done), epoch_of(tmp)) == (newest+1, newest+2)
            assert (tmp.stat().st_size < 0.6*done.stat().st_size) == (halt == 'fsync'), 'the write was not half done'
        else:
            _,epoch,it,training = lines[-1].split()
            in_epoch += training == '1' and 0 < int(it) < n_batch-1
    assert in_epoch >= 2, 'hardly any kill has hit the middle of an epoch'
    assert list(tmp_path.glob('*.tmp'))
    (res,),lines = finish(start(tmp_path, 0))
    assert first_epoch(lines) >= 2 and res == never_killed[0]
    assert sorted(tmp_path.iterdir()) == checkpoints(tmp_path) and [epoch_of(p) for p in checkpoints(tmp_path)] == [9, 10]

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
                                              (dict(classes=5), 'outputs: 10 there, 5 here'), (dict(widths=False), 'space: ')], ids=str)
def test_other_configuration_is_refused(other, difference, folder):
    files,learn,seen = content(folder),learner(**other),Epochs()
    before = [p.clone() for p in learn.model.state_dict().values()]
    with pytest.raises(ValueError, match=difference) as e: fit(learn, checkpoint=folder, cbs=seen)
    assert checkpoints(folder)[-1].name in str(e.value)
    assert len([o for o in str(e.value).splitlines() if ' there, ' in o]) == 1, 'it names what is not different, too'
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

if __name__ == '__main__': main(*sys.argv[1:])
