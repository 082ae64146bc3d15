"""Which way of sharing weights ranks architectures best? Trains supernets on the digits bench and writes nbs/data/ablations.csv.

About an hour on two cores. It may be stopped and started again: what is finished is kept in runs/ablations.
The set 'choosing' has other seeds and other architectures than those that report.
"""
import argparse
import os
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from kshot_nas.study.baselines import ablate, methods
from kshot_nas.study.bench import DigitsBench
from kshot_nas.simplex import Coder, SimplexNet

class FirstOp(Coder):
    "An item for each operation of the first layer: few-shot NAS"
    def codes(self, archs): return torch.eye(self.k)[[a.ops[0] for a in archs]]

base = dict(ratio=(5,1))                 # five steps for the items to one for the codes: see 'choosing'
updates = dict(n_epoch=18)               # the paper's ratio, 2 epochs of warm-up and half of 16: as many updates of the items as one-shot makes in 10 epochs
sets = {                                 # name: (settings by run, number of seeds, widths?)
    'choosing': ({'one-shot': methods['one-shot']} | {f'K-shot, {n} to 1': dict(ratio=(n,1)) for n in (1, 2, 5, 10)}, 8, False),
    'images':   ({n: methods[n] for n in ('one-shot', 'fixed', 'random', 'K-shot')} | {'K-shot, 5 to 1': base}, 16, False),
    'updates':  ({'one-shot': methods['one-shot'], 'K-shot, 18 epochs': updates}, 16, False),
    'items':    ({'K=1': dict(k=1)} | {f'K={k}': base|dict(k=k) for k in (2, 4, 8, 12)}, 8, False),
    'parts':    ({'K-shot, 5 to 1': base, 'no pace': base|dict(pace=False), 'no warm-up': base|dict(warmup=0), 'fast codes': base|dict(codes_scale=0.05),
                  'a code per layer': base|dict(code=partial(SimplexNet, per_layer=True)), 'codes start apart': base|dict(code=partial(SimplexNet, std=1.)),
                  'items almost equal': base|dict(noise=0.1), 'items drawn apart': base|dict(noise=None), 'split by the first op': dict(k=4, code=FirstOp, warmup=5, noise=0.1)}, 6, False),
    'paths':    ({f'in turn, m={m}': updates|dict(n_paths=m) for m in (1, 4, 16)} | {f'joint, m={m}': dict(n_paths=m, joint=True) for m in (1, 4, 16)}, 8, False),
    'epochs':   ({f'one-shot, {n} epochs': dict(k=1, n_epoch=n) for n in (5, 10, 20)} | {f'K-shot, {n} epochs': base|dict(n_epoch=n) for n in (5, 10, 20)}, 8, False),
    'ensemble': ({n: methods[n] for n in ('one-shot', 'ensemble max', 'ensemble avg')}, 8, False),
    'widths':   ({'one-shot': methods['one-shot'], 'K-shot': base, 'K-shot without r_c': base|dict(alpha=0.)}, 6, True)}

if __name__ == '__main__':
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('sets', nargs='*', default=list(sets), help=f"which of {', '.join(sets)}; all by default")
    p.add_argument('--workers', type=int, default=os.cpu_count())
    p.add_argument('--out', default='nbs/data/ablations.csv')
    args = p.parse_args()
    old = pd.read_csv(args.out) if Path(args.out).exists() else pd.DataFrame(columns=['set'])
    for name in args.sets:
        runs, n_seeds, widths = sets[name]
        bench = DigitsBench(widths)
        order = np.random.default_rng(1).permutation(len(bench.archs))
        part,first = (order[:169], 0) if name == 'choosing' else (order[169:369], 100)
        archs = bench.archs if widths else [bench.archs[i] for i in part]
        df = ablate(bench, runs, range(first, first+n_seeds), 'runs/ablations', args.workers, archs)
        old = pd.concat([old[old['set'] != name], df.assign(set=name)])
        old.round(5).to_csv(args.out, index=False)
        print(name, df.groupby('run', sort=False).tau.agg(['mean', 'sem', 'count']).round(3), sep='\n', flush=True)
