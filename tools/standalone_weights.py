"""Train every path of a small space alone on the digits and keep one operation's weights.

The space has four layers of four operations. We fix the 3x3 convolution in the second layer and train each of the
4*4*4 = 64 paths through it, three times over:

- `shared`: every path starts from the same weights and sees the same batches, so only the architecture differs;
- `different`: every path starts from weights of its own;
- `control`: one single path, started from the shared weights and trained on 64 orders of the batches,
  so that nothing but chance differs.

Then it puts `fit_items` to work: in every trained network of the first two sets the weights of that operation are
replaced by their approximation from K items, and the accuracy is measured again (batch norm uses the batch's statistics).

Writes nbs/data/standalone_weights.npz: for each set a (576, 64) matrix, one column per training, the paths and the
accuracies. About two minutes on two cores: python tools/standalone_weights.py
"""
import argparse
import copy
import os
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from kshot_nas.lowrank import fit_items

out_file = Path(__file__).parents[1]/'nbs/data/standalone_weights.npz'
n_train, n_ch, layer, op = 1000, 8, 1, 0           # images, channels, and the operation whose weights are kept
ks = [1, 2, 4, 8, 16, 32, 64]
op_names = ['conv3x3', 'conv1x1', 'dilated3x3', 'skip']

def make_op(name):
    if name == 'skip': return nn.Identity()
    ks, dilation = {'conv3x3': (3, 1), 'conv1x1': (1, 1), 'dilated3x3': (3, 2)}[name]
    conv = nn.Conv2d(n_ch, n_ch, ks, padding=dilation*(ks//2), dilation=dilation, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(n_ch), nn.ReLU())

def make_net(path, seed):
    "The network of `path`. The weights of an operation depend on `seed`, its layer and its name, not on the rest of the path."
    def seeded(i, j, make):
        torch.manual_seed(seed*1000 + i*10 + j)
        return make()
    stem = seeded(8, 0, lambda: nn.Sequential(nn.Conv2d(1, n_ch, 3, padding=1, bias=False), nn.BatchNorm2d(n_ch), nn.ReLU()))
    body = [seeded(i, j, lambda: make_op(op_names[j])) for i,j in enumerate(path)]
    head = seeded(9, 0, lambda: nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4*n_ch, 10)))
    return nn.Sequential(stem, *body, head)

def digits():
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8)/8 - 1, torch.tensor(y)

@torch.no_grad()
def accuracy(net, batch_stats=False):
    "Accuracy on the held-out images, all in one batch"
    x, y = digits()
    return (net.train(batch_stats)(x[n_train:]).argmax(1) == y[n_train:]).float().mean().item()

def train(path, init_seed, order_seed, epochs=12, bs=64, lr=0.1):
    "Train `path` from scratch and return the network."
    torch.set_num_threads(1)
    (x, y), net, gen = digits(), make_net(path, init_seed), torch.Generator().manual_seed(order_seed)
    opt = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, lr, total_steps=epochs*(n_train//bs))
    for _ in range(epochs):
        for idx in torch.randperm(n_train, generator=gen)[:n_train//bs*bs].view(-1, bs):
            loss = nn.functional.cross_entropy(net(x[idx]), y[idx])
            opt.zero_grad(); loss.backward(); opt.step(); sched.step()
    return net

def weight(net): return net[1+layer][0].weight.data

def replaced(nets, W, k):
    "Accuracy of each network after the weights we follow are replaced by their approximation from `k` items"
    nets, approx = copy.deepcopy(nets), fit_items(W, k).approx
    for net,w in zip(nets, approx.T): weight(net).copy_(w.view_as(weight(net)))
    return [accuracy(net, batch_stats=True) for net in nets]

def jobs():
    "(path, seed of the weights, seed of the batches) of every training, by set."
    paths = [p for p in product(range(len(op_names)), repeat=4) if p[layer] == op]
    control = (1, op, 2, 3)
    return {'shared':    [(p, 0, 0) for p in paths],
            'different': [(p, i+1, 0) for i,p in enumerate(paths)],
            'control':   [(control, 0, i+1) for i in range(len(paths))]}

if __name__ == '__main__':
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument('--workers', type=int, default=os.cpu_count())
    ap.add_argument('--out', type=Path, default=out_file)
    args = ap.parse_args()
    res = {'ks': np.int8(ks)}
    with ProcessPoolExecutor(args.workers) as ex:
        for name,js in jobs().items():
            nets = list(ex.map(train, *zip(*js)))
            W = torch.stack([weight(net).flatten() for net in nets], 1)
            accs = [accuracy(net) for net in nets]
            res |= {name: W.numpy(), f'{name}_acc': np.float32(accs), f'{name}_paths': np.int8([p for p,*_ in js])}
            print(f'{name:10} accuracy {np.mean(accs):.3f} (lowest {min(accs):.3f}, highest {max(accs):.3f})', flush=True)
            if name == 'control': continue
            res[f'{name}_own'] = np.float32([accuracy(net, batch_stats=True) for net in nets])
            res[f'{name}_replaced'] = np.float32([replaced(nets, W, k) for k in ks])
            print('           with borrowed weights: ' + ', '.join(f'K={k} {a.mean():.3f}' for k,a in zip(ks, res[f'{name}_replaced'])), flush=True)
    args.out.parent.mkdir(exist_ok=True, parents=True)
    tmp = args.out.with_suffix('.tmp.npz')
    np.savez_compressed(tmp, **res)
    tmp.replace(args.out)
    print(f'wrote {args.out} ({args.out.stat().st_size//1000} kB)')
