"""What is a search worth in the end? On the digits bench: the true accuracy of what is found, against random search with as many evaluations.

Trains supernets, lets both kinds of search use their evaluations under a budget, and looks the winners up in the truth.
Writes nbs/data/bench_search.csv; some minutes on one core.
"""
import argparse
from functools import partial

import pandas as pd
import torch

from kshot_nas.study.baselines import train_run
from kshot_nas.study.bench import DigitsBench
from kshot_nas.cost import CostTable
from kshot_nas.problem import ArchProblem
from kshot_nas.search import search

def look_up(pred, bench, arch): return pred[bench.distinct(arch)]

if __name__ == '__main__':
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('--supernets', type=int, default=16)
    p.add_argument('--searches', type=int, default=10, help='of each kind with each supernet')
    p.add_argument('--out', default='nbs/data/bench_search.csv')
    args = p.parse_args()
    torch.set_num_threads(1)
    bench, rows = DigitsBench(), []
    net = bench.supernet(k=1)
    table, every = CostTable(net), list(net.space)
    budget = int(table.flops(every).double().median())
    true = sorted((bench.true(a) for a in {bench.distinct(a) for a, f in zip(every, table.flops(every)) if f <= budget}), reverse=True)
    for seed in range(200, 200+args.supernets):
        run = dict(k=1)
        pred = dict(zip(bench.archs, train_run(bench, run, seed, bench.archs)['pred']))
        problem = ArchProblem(net.space, partial(look_up, pred, bench), table)
        for gens in (2, 5, 10):
            for how in ('nsga2', 'random'):
                for s in range(args.searches):
                    best = search(problem, max_flops=budget, how=how, pop=20, parents=8, gens=gens, seed=s, progress=False).best
                    rows.append(dict(supernet=seed, how=how, evaluations=20*gens, search=s, borrowed=pred[bench.distinct(best)], true=bench.true(best),
                                     regret=true[0]-bench.true(best), rank=1+sum(t > bench.true(best) for t in true)))
    df = pd.DataFrame(rows)
    df.round(5).to_csv(args.out, index=False)
    print(f'{len(true)} different networks with at most {budget:,} FLOPs; their mean true accuracy is {sum(true)/len(true):.4f}, the best has {true[0]:.4f}')
    print(df.groupby(['evaluations', 'how'])[['borrowed', 'true', 'regret', 'rank']].mean().round(4))
