"""What more processes bring: training with accelerate, searching with joblib's and with Dask's workers.

    python benchmarks/scale.py              # about ten minutes on two idle cores; writes nbs/data/scale.csv

Everything runs on this machine, one thread a process, so no more than its cores can help. Seconds are of the clock, of
the fastest of some turns; the ways take turns. Training: cells of NAS-Bench-201 on made-up images of 16x16, the same
number of images a step however many processes share it. Search: the same supernet, 96 architectures, evaluated on
1,000 images; workers have been started, and have the supernet, before time is taken.
"""
import argparse
import os
import socket
import subprocess
import sys
import time
import warnings
from contextlib import ExitStack
from functools import partial

os.environ.update(OMP_NUM_THREADS='1', PYTHONWARNINGS='ignore')
warnings.filterwarnings('ignore')

import joblib
import pandas as pd
import torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.distributed import rank_distrib, teardown_distrib
from fastai.losses import CrossEntropyLossFlat

from kshot_nas.learner import kshot_learner
from kshot_nas.nb201 import nb201_supernet

supernet = partial(nb201_supernet, n=1, size=16)
bs,n_train,n_valid = 128,2560,1000

def learner(n_processes=1):
    "Untrained, on images of noise"
    gen = torch.Generator().manual_seed(0)
    x,y = torch.randn(n_train+n_valid, 3, 16, 16, generator=gen),torch.randint(10, (n_train+n_valid,), generator=gen)
    pairs = [(a.clone(), b) for a,b in zip(x, y)]
    dls = DataLoaders.from_dsets(pairs[:n_train], pairs[n_train:], bs=bs//n_processes, val_bs=250, num_workers=0, device='cpu')
    return kshot_learner(dls, supernet, k=8, n_out=10, warmup=0, n_paths=4, loss_func=CrossEntropyLossFlat())

class Times(Callback):
    "Seconds of each epoch's training"
    order,seconds = 100,()
    def before_train(self): self.start = time.perf_counter()
    def after_train(self): self.seconds = (*self.seconds, time.perf_counter()-self.start)

def train(n_processes):
    "An epoch that makes momentum and kernels, and one that is timed"
    learn,times = learner(n_processes),Times()
    with ExitStack() as stack:
        if n_processes > 1: stack.enter_context(learn.distrib_ctx(cpu=True))
        for quiet in learn.no_bar(), learn.no_logging(): stack.enter_context(quiet)
        learn.fit_kshot(2, lr=0.05, cbs=times)
    if not rank_distrib(): print(f'seconds: {times.seconds[-1]}', flush=True)
    teardown_distrib()

def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]

def trained_by(n_processes) -> float:
    "Seconds of an epoch with so many processes"
    script = [__file__, '--train', str(n_processes)]
    launch = ['-m', 'torch.distributed.run', f'--nproc-per-node={n_processes}', f'--master-port={free_port()}']
    out = subprocess.run([sys.executable, *(launch if n_processes > 1 else []), *script], stdout=subprocess.PIPE, text=True, check=True).stdout
    return float(next(l for l in out.splitlines() if l.startswith('seconds'))[9:])

def searched_by(learn, workers, dask) -> float:
    "Seconds for each architecture of a search"
    def search(gens): return learn.search(pop=32, parents=8, gens=gens, workers=1 if dask else workers, progress=False)
    with ExitStack() as stack:
        if dask:
            from distributed import Client, LocalCluster
            cluster = stack.enter_context(LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None))
            stack.enter_context(Client(cluster))
            stack.enter_context(joblib.parallel_config(backend='dask'))
        search(1)
        start = time.perf_counter()
        n = len(search(3).history)
        return (time.perf_counter()-start)/n

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--turns', type=int, default=3, help='how often each is timed; the fastest counts (default: %(default)s)')
    p.add_argument('--out', default='nbs/data/scale.csv')
    p.add_argument('--train', type=int, help=argparse.SUPPRESS)
    args = p.parse_args()
    torch.set_num_threads(1)
    if args.train: return train(args.train)
    learn,rows = learner(),[]
    ways = {('training', 'accelerate', n): partial(trained_by, n) for n in (1, 2)}
    ways |= {('search', 'joblib', n): partial(searched_by, learn, n, False) for n in (1, 2)}
    ways |= {('search', 'Dask', n): partial(searched_by, learn, n, True) for n in (1, 2, 4)}
    for _ in range(args.turns): rows += [dict(zip(('job', 'by', 'processes'), way), seconds=f()) for way,f in ways.items()]
    df = pd.DataFrame(rows).groupby(['job', 'by', 'processes'], sort=False).seconds.min().reset_index()
    alone = df[df.processes == 1].drop_duplicates('job').set_index('job').seconds
    df['times as fast'] = df.job.map(alone)/df.seconds
    print(df.round(3).to_string(index=False))
    df.round(4).to_csv(args.out, index=False)

if __name__ == '__main__': main()
