"""How well do supernets rank the architectures of NAS-Bench-201, as trained by others? CIFAR-10 on two cores.

    python benchmarks/nb201.py --images cifar10_jpg.tar.gz --truth nb201_cifar10_dev.csv --out nb201

trains supernets of every kind with every seed, each in about half an hour, and evaluates architectures that the
benchmark has trained at full size. It goes on where it was stopped, within a supernet, too, and prints a table of what
there is so far, which is also in table.csv of that folder. `--images` is an archive of CIFAR-10 with a file for each image, .../train/<class>/<name>.jpg. The
supernets are small: images averaged down to 16x16, one cell in a stage (--size 32 --cells 5: as in the benchmark).
To see it work in a minute: --n-images 2000 --epochs 2 --archs 20 --seeds 1 --runs one-shot K-shot
"""
import argparse, io, tarfile
from functools import cached_property, partial
from pathlib import Path

import numpy as np, pandas as pd, torch
import torch.nn.functional as F
from fastcore.basics import noop
from fastai.data.all import ItemTransform
from PIL import Image

from kshot_nas.nb201 import nb201_supernet, read_nb201
from kshot_nas.rank import kendall_tau
from kshot_nas.study.baselines import ablate, methods, summary
from kshot_nas.study.proxies import mixed, proxy_scores
from kshot_nas.study.truth import Bench

class FlipShift(ItemTransform):
    "Flip every second image, and move each eighth of a batch by some pixels"
    def __init__(self, most): self.most = most
    def encodes(self, b):
        x,y = b
        x = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(-1), x)
        size,x = x.shape[-1],F.pad(x, [self.most]*4)
        corners = torch.randint(2*self.most + 1, (8, 2)).tolist()
        return torch.cat([p[...,i:i+size,j:j+size] for p,(i,j) in zip(x.chunk(8), corners)]),y

class CifarBench(Bench):
    "Architectures of NAS-Bench-201, their published accuracy, and CIFAR-10 to train small supernets on"
    name,bs = 'nb201',128
    sizes = dict(valid=100, test=100)       # the benchmark publishes percentages
    settings = dict(n_epoch=56, lr=0.1, k=8, n_paths=8, item_paths=8, warmup=14, ratio=(5,1), noise=0.1)

    def __init__(self, images, truth, size=16, cells=1, width=16, n_images=None, n_archs=1000):
        self.images,self.truth_file,self.size,self.n_images,self.n_archs = images,truth,size,n_images,n_archs
        self.supernet = partial(nb201_supernet, n=cells, c=width, size=size)

    @cached_property
    def table(self):
        df = read_nb201(self.truth_file)
        df = df.iloc[np.random.default_rng(0).permutation(len(df))[:self.n_archs]]
        return dict(archs=list(df.index), valid=df[['cifar10_valid']].to_numpy(), test=df[['cifar10_test']].to_numpy(),
                    params=df.params_M.to_numpy(), flops=df.flops_M.to_numpy())

    def make_data(self):
        "The training images, but for one in twenty-five that architectures are evaluated on; test images are not touched"
        with tarfile.open(self.images) as tar:
            found = {m.name:tar.extractfile(m).read() for m in tar if m.isfile() and 'train' in Path(m.name).parts}
        names = np.random.default_rng(0).permutation(sorted(found))[:self.n_images]
        classes = sorted({Path(n).parts[-2] for n in names})
        x = [np.asarray(Image.open(io.BytesIO(found[n])).convert('RGB')) for n in names]
        x = torch.from_numpy(np.stack(x)).permute(0, 3, 1, 2)
        y = torch.tensor([classes.index(Path(n).parts[-2]) for n in names])
        x = torch.cat([F.adaptive_avg_pool2d(b.float()/255, self.size) for b in x.split(1000)])
        x = (x - x.mean((0,2,3), keepdim=True))/x.std((0,2,3), keepdim=True)
        n = len(x)//25
        return dict(train=(x[n:], y[n:]), valid=(x[:n], y[:n]))

    def dls(self): return super().dls(after_batch=(FlipShift(self.size//8), noop))

if __name__ == '__main__':
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--images', required=True)
    p.add_argument('--truth', required=True)
    p.add_argument('--out', default='nb201', help='folder for results and checkpoints')
    p.add_argument('--runs', nargs='+', default=['one-shot', 'fixed', 'random', 'K-shot'], choices=list(methods))
    p.add_argument('--seeds', type=int, default=8)
    p.add_argument('--first-seed', type=int, default=0)
    p.add_argument('--workers', type=int, default=1, help='supernets that are trained at the same time')
    p.add_argument('--k', type=int, default=8)
    p.add_argument('--epochs', type=int, default=56)
    p.add_argument('--paths', type=int, default=8, help='in a step for the items; 1: as in the paper')
    p.add_argument('--archs', type=int, default=1000, help='architectures to rank')
    p.add_argument('--size', type=int, default=16, help='of the images')
    p.add_argument('--cells', type=int, default=1, help='in a stage')
    p.add_argument('--width', type=int, default=16, help='channels of the first stage')
    p.add_argument('--n-images', type=int, help='use only so many')
    args = p.parse_args()
    bench = CifarBench(args.images, args.truth, args.size, args.cells, args.width, args.n_images, args.archs)
    scale = dict(n_epoch=args.epochs, warmup=args.epochs//4, item_paths=args.paths)
    runs = {name:dict(k=args.k) | methods[name] | scale for name in args.runs}
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    proxies = proxy_scores(bench, n_seeds=1)
    beside = {n:[s] for n,s in proxies.items()} | dict(both=[proxies[n] for n in proxies])
    df = ablate(bench, runs, seeds, args.out, args.workers, checkpoints=True, beside=beside)
    yard = {n:kendall_tau(s, bench.test.mean(1)) for n,s in proxies.items()} | bench.yardsticks()
    yard['both proxies'] = kendall_tau(mixed(*beside['both']), bench.test.mean(1))
    print(bench, pd.Series(yard, name='tau').round(3).to_string(), sep='\n\n')
    for what in ('tau', 'tau_loss', *(f'tau_loss_{n}' for n in beside)):
        print('', summary(df, what=what).round(3).to_string(), sep='\n')
    scale = dict(epochs=args.epochs, paths=args.paths, size=args.size, cells=args.cells, archs=len(bench.archs))
    table,file = pd.concat([pd.DataFrame(dict(run=list(yard), tau=list(yard.values()))), df]),Path(args.out)/'table.csv'
    table = table.assign(**scale).round(4)
    if file.exists():                                       # results of another scale stay
        old = pd.read_csv(file)
        table = pd.concat([old[(old[list(scale)] != pd.Series(scale)).any(axis=1)], table])
    table.to_csv(file, index=False)
