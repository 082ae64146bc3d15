"""See weight sharing fail and K-shot mend part of it, on the digits that come with scikit-learn: about half a minute.

Trains 24 small networks alone, then lets the same layer of each compute with one weight shared by all (one-shot) or
with its own mixture of K of them (K-shot), and measures what is left of their accuracy.
"""
import os
import random
from concurrent.futures import ProcessPoolExecutor

import torch
from standalone_weights import accuracy, jobs, replaced, train, weight

from kshot_nas import __version__
from kshot_nas.lowrank import fit_kshot

if __name__ == '__main__':
    print(f'kshot_nas {__version__}: training 24 networks alone ...', flush=True)
    js = random.Random(0).sample(jobs()['shared'], 24)
    with ProcessPoolExecutor(os.cpu_count()) as ex: nets = list(ex.map(train, *zip(*js)))
    W = torch.stack([weight(net).flatten() for net in nets], 1)
    own = torch.tensor([accuracy(net, batch_stats=True) for net in nets])
    print(f'their accuracy: {own.mean():.3f} on average, {own.min():.3f} for the worst\n')
    print('One layer of each now computes with weights mixed from K shared ones:\n')
    print('                 K   weights missed   mean accuracy   worst network')
    for k in (1, 2, 4, 8, 16):
        acc = torch.tensor(replaced(nets, W, k))
        name = 'one-shot' if k == 1 else 'K-shot'
        print(f'{name:>12} {k:>5} {fit_kshot(W, k).rel_error:>16.0%} {acc.mean():>15.3f} {acc.min():>15.3f}')
    print('\nWhy, and what it has to do with searching for networks: nbs/00_lowrank.ipynb')
