"Retraining that is killed, and files that others open."
import hashlib
import os
import signal
import subprocess
import sys
import time
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from sklearn.datasets import load_digits

from kshot_nas.retrain import retrain_learner
from kshot_nas.export import export_onnx, export_torch, load_model, save_model
from kshot_nas.tiny import tiny_supernet

def data():
    x,y = load_digits(return_X_y=True)
    return torch.tensor(x).float().view(-1,1,8,8)/8-1,torch.tensor(y)

net  = tiny_supernet(k=1, nf=8, widths=True)
arch = net.space.sample(1, seed=11)[0]

def learner(**kwargs):
    x,y = data()
    sets = (list(zip(x[s], y[s])) for s in (slice(96), slice(96, 160)))
    dls = DataLoaders.from_dsets(*sets, bs=16, num_workers=0, device='cpu', drop_last=False)
    return retrain_learner(dls, net.subnet(arch, weights='fresh'), **(dict(dropout=0.2, rand_augment=(2, 5), erase=0.3) | kwargs))

def fit(learn, n_epoch=4, **kwargs):
    with learn.no_bar(), learn.no_logging(): learn.fit_retrain(n_epoch, **kwargs)
    return learn

def result(learn):
    "What two runs must have in common to be the same: a digest of weights and statistics, and what was recorded"
    digest = hashlib.sha256(b''.join(t.numpy().tobytes() for t in learn.model.state_dict().values())).hexdigest()
    return digest,[list(map(float, v)) for v in learn.recorder.values],[float(o) for o in learn.recorder.losses]

# Killed ----------------------------------------------------------------------------------------------------------------------

class Tell(Callback):
    "Tells of every event, and in which epoch it happens; at `wait` it waits to be killed"
    order = 300
    def __init__(self, conn, wait): self.conn,self.wait = conn,wait
    def __call__(self, event_name):
        self.conn.send(now := (event_name, getattr(self.learn, 'epoch', 0)))
        if now == self.wait: time.sleep(60)

def train(conn, folder, wait):
    torch.set_num_threads(1)
    conn.send(('result', result(fit(learner(), checkpoint=folder, cbs=Tell(conn, wait)))))

def run(folder, kill=None):
    "What a process tells that trains; it is killed as soon as it tells `kill`"
    ctx = get_context('forkserver')
    ours,theirs = ctx.Pipe(duplex=False)
    proc = ctx.Process(target=train, args=(theirs, folder, kill), daemon=True)
    proc.start(); theirs.close()
    told = []
    try:
        while True:
            told.append(ours.recv())
            if told[-1] == kill: os.kill(proc.pid, signal.SIGKILL)
    except (EOFError, OSError): pass                    # its end, or its end in the middle of a word
    finally: proc.kill(); proc.join(); ours.close()
    assert proc.exitcode == (0 if kill is None else -signal.SIGKILL)
    return told

@pytest.mark.skipif(not hasattr(signal, 'SIGKILL'), reason='this system has no SIGKILL')
def test_killed_and_resumed(monkeypatch, tmp_path):
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    monkeypatch.setenv('PYTHONWARNINGS', 'ignore')
    get_context('forkserver').set_forkserver_preload(['kshot_nas.retrain', 'kshot_nas.tiny', 'sklearn.datasets', 'torch._dynamo'])
    *_,(_,whole) = run(tmp_path/'whole')
    run(tmp_path/'killed', kill=('after_step', 1))
    told = run(tmp_path/'killed', kill=('before_validate', 2))
    assert ('before_train', 0) not in told and ('before_train', 1) in told                   # goes on with the epoch it was killed in
    told = run(tmp_path/'killed')
    assert [e for what,e in told if what == 'before_train'] == [2, 3]
    assert told[-1] == ('result', whole)

def test_damaged_checkpoint_is_passed_over(tmp_path):
    whole = result(fit(learner(), checkpoint=tmp_path))
    newest = max(tmp_path.glob('epoch_*.pt'))
    newest.write_bytes(newest.read_bytes()[:-100])
    assert result(fit(learner(), checkpoint=tmp_path)) == whole                              # the last epoch is trained again

# Exported --------------------------------------------------------------------------------------------------------------------

def in_new_process(prog, *args): return subprocess.run([sys.executable, '-c', prog, *map(str, args)], capture_output=True, text=True, cwd=os.path.dirname(args[0]))

@pytest.fixture(scope='module')
def exported(tmp_path_factory):
    "A trained network, images, and its outputs for them, the latter in files"
    folder,learn = tmp_path_factory.mktemp('exported'),fit(learner(), 2)
    x = data()[0][1000:1013]
    with torch.no_grad(): out = learn.model.eval()(x)
    np.save(folder/'x.npy', x.numpy()); np.save(folder/'out.npy', out.numpy())
    return folder,learn.model,x,out

def test_onnx_without_torch(exported):
    for m in ('onnx', 'onnxscript', 'onnxruntime'): pytest.importorskip(m)
    folder,model,*_ = exported
    path = export_onnx(model, folder/'model.onnx')
    res = in_new_process('''
import sys, numpy as np, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1])
x,out = np.load('x.npy'),np.load('out.npy')
for n in (1, len(x)):
    got, = session.run(['logits'], {'image': x[:n]})
    assert got.shape == (n, 10) and np.abs(got-out[:n]).max() < 1e-4 and (got.argmax(1) == out[:n].argmax(1)).all()
assert 'torch' not in sys.modules
print('same')''', path)
    assert res.stdout == 'same\n', res.stderr
    assert sorted(p.name for p in folder.glob('*onnx*')) == ['model.onnx']                   # one file, and nothing left behind

def test_program_without_kshot_nas(exported):
    folder,model,*_ = exported
    res = in_new_process('''
import sys, numpy as np, torch
program = torch.export.load(sys.argv[1]).module()
x,out = (torch.tensor(np.load(f)) for f in ('x.npy', 'out.npy'))
assert (program(x)-out).abs().max() < 1e-4 and not [m for m in sys.modules if m.startswith(('kshot_nas', 'fastai'))]
print('same')''', export_torch(model, folder/'model.pt2'))
    assert res.stdout == 'same\n', res.stderr

def test_model_file(exported):
    folder,model,x,out = exported
    path = save_model(model, folder/'model.pt', arch, classes=['a'])
    with torch.no_grad(): assert torch.equal(load_model(path)(x), out)

def test_model_file_builds_no_supernet(exported, monkeypatch):
    folder,model,*_ = exported
    path = save_model(model, folder/'model.pt', arch)
    def refuse(*args, **kwargs): raise AssertionError('a supernet is built')
    monkeypatch.setattr('kshot_nas.supernet.Supernet.__init__', refuse)
    load_model(path)

class Evil:
    def __init__(self, path): self.path = path
    def __reduce__(self): return (open, (str(self.path), 'w'))

def test_model_file_runs_no_code(tmp_path):
    for o in dict(format='kshot_nas model 2', arch=Evil(tmp_path/'harm')),dict(format='kshot_nas model 2', arch='0', info={}, model=Evil(tmp_path/'harm')):
        torch.save(o, tmp_path/'model.pt')
        with pytest.raises(ValueError, match="was not written by"): load_model(tmp_path/'model.pt')
    assert not (tmp_path/'harm').exists()

# Compiled --------------------------------------------------------------------------------------------------------------------

def test_compiled():
    "A compiled network is trained alike, its averaged weights and checkpoints as those of any other"
    seen = []
    def backend(graph, inputs):
        seen.append(len(inputs))
        return graph
    def trained(compiled):
        learn = learner()
        if compiled: learn.model.compile(backend=backend)
        return fit(learn, 2)
    plain,compiled = trained(False),trained(True)
    assert len(seen) >= 2                                           # for training and for evaluation
    a,b = (o.model.state_dict() for o in (plain, compiled))
    assert list(a) == list(b)
    for name in a: torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5)
    assert list(plain.recorder.values[-1]) == pytest.approx(list(compiled.recorder.values[-1]), rel=1e-4)
