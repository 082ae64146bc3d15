"""Which way of sharing weights ranks architectures best? Trains supernets on both benches and writes nbs/data/ablations.csv.

About an hour on two cores for the digits, and several for the sets of signals. It may be stopped and started again: what is finished is kept in runs/ablations.
The set 'choosing' has other seeds and other architectures than those that report; the same holds for the sets of signals,
which leave out the hundred architectures and the seeds on which their settings were chosen.
"""
import argparse
import os
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from fastai.callback.core import Callback
from fastai.metrics import AccumMetric, accuracy

from kshot_nas.phases import ContrastTerm
from kshot_nas.retrain import WeightEMA
from kshot_nas.study.baselines import ablate, methods
from kshot_nas.study.bench import DigitsBench, SignalsBench
from kshot_nas.study.proxies import proxy_scores
from kshot_nas.simplex import Coder, SimplexNet

class FirstOp(Coder):
    "An item for each operation of the first layer: few-shot NAS"
    def codes(self, archs): return torch.eye(self.k)[[a.ops[0] for a in archs]]

def entropy(lam): return -(lam*lam.clamp(min=1e-9).log()).sum(-1)

class Decide(Callback):
    "Raises the mutual information of architecture and item: all items are used, each architecture uses few"
    order,run_valid = ContrastTerm.order,False
    def after_loss(self):
        if self.phase == 'items': return
        archs = self.model.net.space.sample(64, seed=7, start=64*self.model.clock.codes)
        lam = self.model.codes_of(archs, False)
        self.learn.loss_grad = self.loss_grad - (entropy(lam.mean(0)) - entropy(lam).mean())

class Averaged(WeightEMA):
    "Weights averaged over the last hundred steps"
    def __init__(self): super().__init__(0.99)

class loss_calibrated(AccumMetric):
    "The loss at the best of 41 temperatures: what is left when confidence is put right"
    def __init__(self): super().__init__(lambda z, y: min(F.cross_entropy(z*t, y) for t in torch.logspace(-1, 1, 41)), flatten=False)
    name = property(lambda self: 'loss_calibrated', lambda self, _: None)

base = dict(ratio=(5,1))                 # five steps for the items to one for the codes: see 'choosing'
updates = dict(n_epoch=18)               # the paper's ratio, 2 epochs of warm-up and half of 16: as many updates of the items as one-shot makes in 10 epochs
widths = partial(DigitsBench, widths=True)
scored = dict(metrics=(accuracy, loss_calibrated), again=dict(loss_recalibrated=dict(stats='train', n_stats=40)))
free = dict(codes_scale=0.05)              # Adam at 0.005 in place of 0.001
one_path = dict(n_paths=6, item_paths=1)    # in a step for the items, as in the paper
adapted = dict(again={f'loss_{n}': dict(adapt=n, adapt_lr=0.01) for n in (20, 60)})     # of 0.1, 0.03 and 0.01 the best on 60 of the architectures for choosing, one seed
sets = {                                 # name: (settings by run, number of seeds, bench)
    'choosing': ({'one-shot': methods['one-shot']} | {f'K-shot, {n} to 1': dict(ratio=(n,1)) for n in (1, 2, 5, 10)}, 8, DigitsBench),
    'images':   ({n: methods[n] for n in ('one-shot', 'fixed', 'random', 'K-shot')} | {'K-shot, 5 to 1': base}, 16, DigitsBench),
    'updates':  ({'one-shot': methods['one-shot'], 'K-shot, 18 epochs': updates}, 16, DigitsBench),
    'items':    ({'K=1': dict(k=1)} | {f'K={k}': base|dict(k=k) for k in (2, 4, 8, 12)}, 8, DigitsBench),
    'parts':    ({'K-shot, 5 to 1': base, 'no pace': base|dict(pace=False), 'no warm-up': base|dict(warmup=0), 'fast codes': base|dict(codes_scale=0.05),
                  'a code per layer': base|dict(code=partial(SimplexNet, per_layer=True)), 'codes start apart': base|dict(code=partial(SimplexNet, std=1.)),
                  'items almost equal': base|dict(noise=0.1), 'items drawn apart': base|dict(noise=None), 'split by the first op': dict(k=4, code=FirstOp, warmup=5, noise=0.1)}, 6, DigitsBench),
    'paths':    ({f'in turn, m={m}': updates|dict(n_paths=m) for m in (1, 4, 16)} | {f'joint, m={m}': dict(n_paths=m, joint=True) for m in (1, 4, 16)}, 8, DigitsBench),
    'epochs':   ({f'one-shot, {n} epochs': dict(k=1, n_epoch=n) for n in (5, 10, 20)} | {f'K-shot, {n} epochs': base|dict(n_epoch=n) for n in (5, 10, 20)}, 8, DigitsBench),
    'votes':    ({'one-shot': methods['one-shot'], 'votes': methods['votes'], 'K=21, votes': dict(k=21, code='votes')}, 8, DigitsBench),
    'item paths': ({f'one-shot, {m} paths': dict(k=1, item_paths=m) for m in (1, 4)}, 8, DigitsBench),
    'ensemble': ({n: methods[n] for n in ('one-shot', 'ensemble max', 'ensemble avg')}, 8, DigitsBench),
    'widths':   ({'one-shot': methods['one-shot'], 'K-shot': base, 'K-shot without r_c': base|dict(alpha=0.)}, 6, widths),
    'signals':  ({n: one_path|methods[n] for n in ('one-shot', 'fixed', 'random', 'K-shot')} | {'one-shot, no decay, uniform': one_path|dict(k=1, wd=0., how='uniform')}, 16, SignalsBench),
    'signals, paths': ({f'{n}, 4 paths': methods[n] for n in ('one-shot', 'K-shot', 'random', 'joint')}, 8, SignalsBench),
    'signals, alone': ({f'alone, {n} epochs': dict(alone=n) for n in (1, 2, 3)}, 4, SignalsBench),
    'signals, adapted': ({n: methods[n]|adapted for n in ('one-shot', 'K-shot')}, 4, SignalsBench),
    'signals, items': ({f'K={k}': dict(k=k) for k in (1, 2, 4, 8, 12)} | {'K=8, a code per edge': dict(code=partial(SimplexNet, per_layer=True))}, 8, SignalsBench),
    'signals, scores': ({'K=1': scored|dict(k=1), 'K=1, averaged': dict(k=1, cbs=Averaged)}, 1, SignalsBench),
    'signals, free codes': ({'K=8, free codes': free}, 8, SignalsBench),
    'signals, decided': ({'K=8, decided': free|dict(cbs=Decide)}, 2, SignalsBench),
    'signals, votes': ({'K=31, votes': dict(k=31, code='votes')}, 16, SignalsBench),                  # an item for each operation
    'signals, few votes': ({'K=8, votes': dict(code='votes')}, 8, SignalsBench),
    'signals, votes, longer': ({'K=1, 16 epochs': dict(k=1, n_epoch=16), 'K=31, votes, 16 epochs': dict(k=31, code='votes', n_epoch=16)}, 8, SignalsBench),
    'signals, votes, longest': ({'K=31, votes, 32 epochs': dict(k=31, code='votes', n_epoch=32)}, 4, SignalsBench),
    'signals, random, longest': ({'K=31, random, 32 epochs': dict(k=31, code='random', n_epoch=32)}, 3, SignalsBench),
    'signals, longer': ({f'{n}, 32 epochs': methods[n]|dict(n_epoch=32, warmup=8) for n in ('one-shot', 'K-shot')}, 4, SignalsBench)}

def split(bench, name):
    "Architectures and the first seed of a set"
    if name == 'signals, scores': return bench.archs[:100] + bench.archs[300:],200
    # seeds of its own, so that K=1 and K=8 add to those of 'signals, paths'
    if isinstance(bench, SignalsBench): return bench.archs[100:300],108 if name == 'signals, items' else 100
    if bench.widths: return bench.archs,100
    order = np.random.default_rng(1).permutation(len(bench.archs))
    part,first = (order[:169], 0) if name == 'choosing' else (order[169:369], 100)
    return [bench.archs[i] for i in part],first

if __name__ == '__main__':
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('sets', nargs='*', default=list(sets), help=f"which of {', '.join(sets)}; all by default")
    p.add_argument('--workers', type=int, default=os.cpu_count())
    p.add_argument('--seeds', type=int, default=16, help='at most so many of each run (default: %(default)s)')
    p.add_argument('--out', default='nbs/data/ablations.csv')
    args = p.parse_args()
    old = pd.read_csv(args.out) if Path(args.out).exists() else pd.DataFrame(columns=['set'])
    for name in args.sets:
        runs, n_seeds, make = sets[name]
        bench = make()
        archs,first = split(bench, name)
        seeds = range(first, first+min(n_seeds, args.seeds))
        beside = {n:[s] for n,s in proxy_scores(bench, archs, n_seeds=1).items()}
        df = ablate(bench, runs, seeds, 'runs/ablations', args.workers, archs, beside=beside)
        old = pd.concat([old[old['set'] != name], df.assign(set=name)])
        old.round(5).to_csv(args.out, index=False)
        print(name, df.groupby('run', sort=False).tau.agg(['mean', 'sem', 'count']).round(3), sep='\n', flush=True)
