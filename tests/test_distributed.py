"Two processes on one machine train together, as `accelerate launch` starts them, over gloo on the CPU."
import os
import socket
import subprocess
import sys

import pytest
import torch

pytest.importorskip('accelerate')

script = '''
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

def run(folder, n_proc, n_paths, bs):
    "Run the script in `n_proc` processes; the state of each at the end"
    folder.mkdir()
    with socket.socket() as s: s.bind(('127.0.0.1', 0)); port = s.getsockname()[1]
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': ''}
    if n_proc > 1: env |= dict(WORLD_SIZE=str(n_proc), LOCAL_WORLD_SIZE=str(n_proc), MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port), ACCELERATE_USE_CPU='true')
    procs = [subprocess.Popen([sys.executable, '-c', script, str(folder), str(n_paths), str(bs), 'together' if n_proc > 1 else 'alone'],
                              env={**env, **(dict(RANK=str(r), LOCAL_RANK=str(r)) if n_proc > 1 else {})}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for r in range(n_proc)]
    try: outs = [p.communicate(timeout=240)[0] for p in procs]
    finally:
        for p in procs: p.kill()
    assert all(p.returncode == 0 for p in procs), '\n'.join(outs)
    return [torch.load(folder/f'{r}.pt', weights_only=True) for r in range(n_proc)]

def test_two_processes_train_as_one(tmp_path):
    "With one path per step the joined batch of both processes is the batch of one; sums in another order differ by rounding."
    (a,b),(alone,) = run(tmp_path/'two', 2, 1, 8),run(tmp_path/'one', 1, 1, 16)
    assert a['steps'].any() and not a['steps'].all()
    for n in a:
        assert torch.equal(a[n], b[n]), f'{n} differs between the processes'
        torch.testing.assert_close(a[n], alone[n], rtol=1e-3, atol=1e-5)

def test_many_paths_stay_the_same_everywhere(tmp_path):
    a,b = run(tmp_path/'two', 2, 4, 8)
    assert a['steps'].any()
    for n in a: assert torch.equal(a[n], b[n]), f'{n} differs between the processes'
