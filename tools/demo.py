"""From data to a network within a budget, on the digits that come with scikit-learn: about a minute.

Trains a K-shot supernet, draws architectures within a budget, ranks them with the weights they borrow from it, and
trains the best one and three at random alone, from scratch, to see what they are worth.
"""
import time
import warnings

warnings.filterwarnings('ignore', category=FutureWarning, module='torch')

import torch
from fastai.basics import CrossEntropyLossFlat, DataLoaders, Learner, accuracy
from sklearn.datasets import load_digits

from kshot_nas import __version__
from kshot_nas.cost import CostTable
from kshot_nas.learner import kshot_learner
from kshot_nas.tiny import tiny_supernet

def digits():
    x, y = load_digits(return_X_y=True)
    data = list(zip(torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8)/8 - 1, torch.tensor(y)))
    dls = DataLoaders.from_dsets(data[:600], data[600:1200], bs=64, num_workers=0)
    dls.c = 10
    return dls

def alone(dls, model, seeds=3):
    "Mean validation accuracy of `model` after training from scratch"
    accs = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        for m in model.modules():
            if hasattr(m, 'reset_parameters'): m.reset_parameters()
        learn = Learner(dls, model, CrossEntropyLossFlat(), metrics=accuracy)
        with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(12, 0.01)
        accs.append(learn.recorder.values[-1][-1])
    return sum(accs)/seeds

if __name__ == '__main__':
    start, dls = time.perf_counter(), digits()
    learn = kshot_learner(dls, tiny_supernet, k=8, widths=True, warmup=3, loss_func=CrossEntropyLossFlat())
    cost = CostTable(learn.net)
    budget = sum(cost.flops_range())//2
    print(f'kshot_nas {__version__}: {learn.space.size:,} architectures of the tiny supernet, {budget:,} multiply-adds allowed', flush=True)
    with learn.no_bar(), learn.no_logging(): learn.fit_kshot(25, lr=0.1)
    print(f'trained the supernet with 8 items per weight; its codes spread by {learn.code_recorder.spread:.3f} around 1/8', flush=True)
    archs = cost.sample_under(200, max_flops=budget, seed=0)
    ranking = learn.eval_archs(archs, progress=False).sort_values('accuracy', ascending=False)
    print('\nthe best of 200 within the budget, by the weights they borrow:\n')
    print('accuracy   FLOPs    operations and widths')
    for arch, row in ranking.head(5).iterrows():
        names = learn.space.names(arch)
        print(f"  {row.accuracy:.3f}  {cost.flops([arch]).item():7,}   " + ' '.join(f'{o}:{w:g}' if o != 'skip' else o for o, w in zip(*names.values())))
    print('\ntrained alone, from scratch (mean of 3 seeds):', flush=True)
    for name, arch in ('the best of these', ranking.index[0]), *(('one at random', a) for a in archs[:3]):
        print(f'  {name:18} {alone(dls, learn.subnet(arch, weights="fresh")):.3f} with {cost.flops([arch]).item():,} multiply-adds', flush=True)
    print(f'\n{time.perf_counter()-start:.0f} seconds. One run on so small a task proves little about the ranking; it takes many to tell.')
