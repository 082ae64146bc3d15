"""What are finalists worth? On the digits bench: the true accuracy of what one ends up with, against as many random architectures of equal cost.

Trains one-shot supernets. All other trainings are looked up in the table of the bench, but for the short ones of successive halving:
with one seed, validation accuracy decides, and the truth is the mean test accuracy of the other seeds.
Writes nbs/data/finalists.csv; about ten minutes on one core.
"""
import argparse

import numpy as np
import pandas as pd
import torch

from kshot_nas.finalists import halve, spread_out
from kshot_nas.study.baselines import train_run
from kshot_nas.study.bench import DigitsBench

def alike(bench, archs, rng):
    "For each of `archs` another architecture of the bench whose multiply-adds are nearest, of the nearest ten one at random"
    flops, taken, res = bench.cost.flops.to_numpy(), set(bench.rows(archs)), []
    for i in bench.rows(archs):
        near = [j for j in np.argsort(abs(flops-flops[i]), kind='stable') if j not in taken][:10]
        taken.add(j := rng.choice(near))
        res.append(bench.archs[j])
    return res

def picked(bench, archs, seed):
    "The one of `archs` with the best validation accuracy in the training with `seed`; of equal ones, the first"
    return archs[int(bench.valid[bench.rows(archs), seed].argmax())]

def halved(bench, archs, seed, memo):
    "The same by successive halving"
    full = DigitsBench.recipe['n_epoch']
    def valid(arch, n_epoch):
        if n_epoch == full: return bench.valid[bench.rows([arch])[0], seed]
        if (arch, n_epoch, seed) not in memo:
            bench.recipe = DigitsBench.recipe | dict(n_epoch=n_epoch)
            memo[arch, n_epoch, seed] = bench.train_alone(arch, seed)['valid']
        return memo[arch, n_epoch, seed]
    return halve(archs, full, lambda archs, n: [valid(a, n) for a in archs])[-1]['arch']

def true(bench, arch, seed): return np.delete(bench.test[bench.rows([arch])[0]], seed).mean()

if __name__ == '__main__':
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('--supernets', type=int, default=16)
    p.add_argument('--out', default='nbs/data/finalists.csv')
    args = p.parse_args()
    torch.set_num_threads(1)
    bench, rows, memo = DigitsBench(), [], {}
    for supernet in range(200, 200+args.supernets):
        pred = train_run(bench, dict(k=1), supernet, bench.archs)['pred']
        ranked = [bench.archs[i] for i in np.argsort(-np.array(pred), kind='stable')]
        for n in (1, 3, 5, 10, 20):
            archs = spread_out(ranked, n)
            others = alike(bench, archs, np.random.default_rng((supernet, n)))
            for seed in range(bench.test.shape[1]):
                row = dict(supernet=supernet, seed=seed, n=n, first_true=true(bench, ranked[0], seed))
                ways = dict(finalists=picked(bench, archs, seed), random=picked(bench, others, seed), first=picked(bench, ranked[:n], seed))
                if n == 5 and seed < 2: ways |= dict(halving=halved(bench, archs, seed, memo), random_halving=halved(bench, others, seed, memo))
                rows += [dict(row, how=how, arch=a, true=true(bench, a, seed)) for how, a in ways.items()]
        print(supernet, flush=True)
        df = pd.DataFrame(rows)
        df.round(5).to_csv(args.out, index=False)
    print(f'the best of all is worth {bench.test.mean(1).max():.4f}')
    print(df.pivot_table('true', 'n', 'how').round(4))
