"""What could mixtures of shared weights give? Measured on signals, with weights that architectures have made their own.

    python benchmarks/headroom.py          # writes nbs/data/headroom.csv; about six minutes for a seed

A one-shot supernet is trained, and each of 200 architectures makes 60 steps of its own from the weights that it borrows.
How these steps have moved a weight differs between architectures. Kept of it are: what is common to all; the best
approximation of rank r, which is the most that mixtures of r+1 items could express; and what can be predicted from the
operations of architectures that were left out of the fit. Each time the ranking is measured again.
"""
import argparse
import re
import warnings

warnings.filterwarnings('ignore', message='.*torch.jit', category=FutureWarning)

import numpy as np
import pandas as pd
import torch
from sklearn.linear_model import Ridge
from sklearn.model_selection import KFold

from kshot_nas.convert import recalibrate
from kshot_nas.learner import kshot_learner
from kshot_nas.study.bench import SignalsBench

def trained(bench, seed, n_epoch):
    kw = bench.settings | dict(k=1)
    fit = dict(n_epoch=n_epoch, **{n:kw.pop(n) for n in ('lr', 'wd')})
    learn = kshot_learner(bench.dls(), bench.supernet, seed=seed, **{n:v for n,v in kw.items() if n != 'n_epoch'})
    with learn.no_bar(), learn.no_logging(): learn.fit_kshot(**fit)
    return learn

def named(arch, plain) -> dict:
    "Parameters of a plain network by a name that says of which operation they are"
    def op(name): return ''.join(f', op {arch.ops[int(i)]}' for i in re.findall(r'edges\.(\d+)\.', name))
    return {name + op(name):p for name,p in plain.named_parameters()}

def rank_r(M, r):
    "The best approximation of the rows of M by their mean and r directions"
    U,S,V = np.linalg.svd(M - M.mean(0), full_matrices=False)
    return M.mean(0) + (U[:,:r]*S[:r]) @ V[:r]

def predicted(M, X):
    "Rows of M from those of X by ridge regression, each by a fit without it"
    P = np.zeros_like(M)
    for fit,left in KFold(5).split(X): P[left] = Ridge(3.).fit(X[fit], M[fit]).predict(X[left])
    return P

def headroom(bench, archs, seed, n_epoch) -> pd.DataFrame:
    learn = trained(bench, seed, n_epoch)
    X = learn.space.encode(archs)[0].numpy()
    stats = [b[0] for b in learn.batches(0, 8)]
    def measure(name, plains, explained=np.nan):
        with torch.inference_mode(): got = pd.DataFrame([learn._measure(p.eval()) for p in plains])
        taus = {n:bench.report(sign*got[c].to_numpy(), archs, n_boot=0).tau
                for n,c,sign in (('tau_loss', 'loss', -1), ('tau', 'accuracy', 1))}
        print(seed, name, taus, explained, flush=True)
        return dict(weights=name, seed=seed, **taus, explained=explained)
    plains = [learn.net.subnet(a, data=stats) for a in archs]
    before = [{n:p.detach().clone() for n,p in named(a, m).items()} for a,m in zip(archs, plains)]
    rows = [measure('borrowed', plains)]
    for m in plains: learn._adapt(m, 60, 0.01)
    rows.append(measure('own', plains))
    moved = [{n:(p.detach() - b[n]).flatten().double().numpy() for n,p in named(a, m).items()}
             for a,m,b in zip(archs, plains, before)]
    names = sorted({n for m in moved for n in m})
    ways = {f'rank {r}':lambda M,X,r=r: rank_r(M, r) for r in (0, 1, 3, 7, 15)} | {'predicted':predicted}
    for way,f in ways.items():
        kept,left,total = [{} for _ in archs],0.,0.
        for n in names:
            who = [i for i,m in enumerate(moved) if n in m]
            M = np.stack([moved[i][n] for i in who])
            A = f(M, X[who])
            left,total = left + ((M-A)**2).sum(),total + (M**2).sum()
            for i,row in zip(who, A): kept[i][n] = row
        plains = [learn.net.subnet(a, data=stats) for a in archs]
        for a,m,k in zip(archs, plains, kept):
            for n,p in named(a, m).items(): p.data += torch.from_numpy(k[n]).to(p).view_as(p)
            recalibrate(m, stats)
        rows.append(measure(way, plains, 1 - left/total))
    return pd.DataFrame(rows)

if __name__ == '__main__':
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('--seeds', type=int, default=1)
    p.add_argument('--epochs', type=int, default=16)
    p.add_argument('--out', default='nbs/data/headroom.csv')
    args = p.parse_args()
    torch.set_num_threads(1)
    bench = SignalsBench()
    seeds = range(100, 100+args.seeds)
    table = pd.concat([headroom(bench, bench.archs[100:300], s, args.epochs) for s in seeds])
    table.round(5).to_csv(args.out, index=False)
    print(table.groupby('weights', sort=False).mean().round(3).to_string())
