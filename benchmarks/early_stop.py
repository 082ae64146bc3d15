"""What a search could save by not evaluating clearly bad architectures to the end.

A search of 1,000 architectures on the digits is made once, and which images each architecture gets right is kept. Then
it is gone through again: after each tenth of the images an offspring is given up if it is worse than the worst parent
beyond doubt. Only parents matter to what comes next, so unless that is a mistake the search goes the same way.
For a larger validation set its images are drawn with repetition. The simple rival is to use fewer images throughout.

    python benchmarks/early_stop.py                                  # a table, in a minute
    python benchmarks/early_stop.py --out nbs/data/early_stop.csv    # and as a file
"""
import argparse
import os
import time
import warnings

warnings.filterwarnings('ignore', message='.*torch.jit', category=FutureWarning)
os.environ.setdefault('OMP_NUM_THREADS', '1')

import numpy as np
import pandas as pd
import torch
from fastai.data.core import DataLoaders
from fastai.losses import CrossEntropyLossFlat
from sklearn.datasets import load_digits

from kshot_nas.cost import CostTable
from kshot_nas.learner import kshot_learner
from kshot_nas.problem import ArchProblem
from kshot_nas.search import search
from kshot_nas.tiny import tiny_supernet

def trained():
    "A supernet for the digits, as in the readme, and the seconds that its training takes"
    x,y = load_digits(return_X_y=True)
    pairs = list(zip(torch.tensor(x).float().view(-1, 1, 8, 8)/8 - 1, torch.tensor(y)))
    dls = DataLoaders.from_dsets(pairs[:1000], pairs[1000:], bs=100, num_workers=0, device='cpu')
    learn = kshot_learner(dls, tiny_supernet, k=4, n_out=10, widths=True, warmup=2, loss_func=CrossEntropyLossFlat())
    t = time.process_time()
    with learn.no_bar(), learn.no_logging(): learn.fit_kshot(12, lr=0.1)
    return learn,time.process_time()-t

def right(learn):
    "Searches, and gives the history and which images each architecture gets right"
    (x,y),seen = learn.batches(1)[0],{}
    def evaluate(arch):
        with torch.inference_mode(), learn.net.use(arch, learn.code(arch)): seen[arch] = (learn.net(x).argmax(1) == y).numpy()
        return seen[arch].mean()
    learn.model.eval()
    problem = ArchProblem(learn.space, evaluate, CostTable(learn.net))
    t = time.process_time()
    found = search(problem, max_flops=60_000, progress=False)
    return found.history,seen,time.process_time()-t

def saved(history, seen, n_images, parents=20, parts=10, sure=3., seed=0):
    "Share of the images that need no evaluation, and mistakes: future parents given up"
    n = len(next(iter(seen.values())))
    rng = np.random.default_rng(seed)
    pick = rng.permutation(n) if n_images == n else rng.integers(n, size=n_images)
    held,ends = {a: r[pick] for a,r in seen.items()},np.linspace(0, n_images, parts+1).astype(int)[1:]
    pop,done,wrong,stopped = [],0,0,0
    for _,archs in history.groupby('generation').arch:
        bar = held[pop[-1]] if pop else None
        for a in archs:
            at = n_images
            for end in ends[:-1] if pop else ():
                d = bar[:end].astype(float) - held[a][:end]                        # paired: the same images
                if d.mean() > sure*max(d.std(), 0.1)/end**0.5:
                    at = end
                    break
            done += at
            stopped += at < n_images
            wrong += at < n_images and held[a].mean() > bar.mean()
        pop = sorted([*pop, *archs], key=lambda a: -held[a].mean())[:parents]
    return dict(images=n_images, stopped=stopped/len(history), saved=1 - done/n_images/len(history), mistakes=wrong)

def fewer(seen, n, seed=0):
    "How well the accuracy on `n` images orders architectures as that on all does: tau, and the loss of the best"
    held = np.array(list(seen.values()), float)
    pick = np.random.default_rng(seed).permutation(held.shape[1])[:n]
    few,full = pd.Series(held[:,pick].mean(1)),pd.Series(held.mean(1))
    return dict(images=n, tau=few.corr(full, method='kendall'), lost=full.max() - full[few.idxmax()])

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--out', help='write the table to this file as CSV')
    args = p.parse_args()
    torch.set_num_threads(1)
    learn,train = trained()
    history,seen,searched = right(learn)
    n = len(next(iter(seen.values())))
    kinds = {'stop early': [saved(history, seen, m) for m in (n, 2000, 10_000, 50_000)],
             'fewer images': [fewer(seen, m) for m in (100, 200, 400)]}
    print(f'{len(history)} architectures, {n} images; training {train:.1f} s, search {searched:.1f} s of one processor')
    for kind,rows in kinds.items(): print(f'{kind}\n{pd.DataFrame(rows).round(3).to_string(index=False)}')
    df = pd.concat([pd.DataFrame(rows).assign(kind=kind) for kind,rows in kinds.items()])
    if args.out: df.to_csv(args.out, index=False)

if __name__ == '__main__': main()
