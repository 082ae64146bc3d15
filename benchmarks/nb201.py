"""How well does a supernet rank the architectures of NAS-Bench-201? Trains it on CIFAR-10 and compares with the benchmark.

The full protocol wants a GPU:

    python benchmarks/nb201.py --images cifar10 --truth nb201.csv --k 8 --epochs 250 --seed 0
    python benchmarks/nb201.py --images cifar10 --truth nb201.csv --k 1 --epochs 250 --seed 0

`cifar10` is an image folder with train/ and test/, a folder for each class below them; `nb201.csv` is what `read_nb201` reads.
To see it work on a CPU, in some minutes: --epochs 2 --n-images 2000 --cells 1 --width 8 --archs 100
"""
import argparse
from functools import partial

import numpy as np
from fastai.vision.all import (CropPad, DataBlock, CategoryBlock, Flip, ImageBlock, IndexSplitter, Normalize, PadMode, RandomCrop, cifar_stats,
                               get_image_files, parent_label)

from kshot_nas.learner import kshot_learner
from kshot_nas.nb201 import nb201_supernet, read_nb201
from kshot_nas.rank import rank_report

def cifar(path, bs, n_images, seed):
    "Half of the training images for the supernet, the other half to evaluate architectures on, as in the benchmark"
    files = sorted(get_image_files(f'{path}/train'))
    files = [files[i] for i in np.random.default_rng(seed).permutation(len(files))[:n_images]]
    block = DataBlock((ImageBlock, CategoryBlock), get_items=lambda _: files, get_y=parent_label, splitter=IndexSplitter(range(len(files)//2, len(files))),
                      item_tfms=[CropPad(40, pad_mode=PadMode.Zeros), RandomCrop(32)], batch_tfms=[Flip(), Normalize.from_stats(*cifar_stats)])
    return block.dataloaders(path, bs=bs, num_workers=0 if n_images else None)

if __name__ == '__main__':
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--images', required=True)
    p.add_argument('--truth', required=True)
    p.add_argument('--k', type=int, default=8)
    p.add_argument('--epochs', type=int, default=250)
    p.add_argument('--lr', type=float, default=0.05)
    p.add_argument('--bs', type=int, default=256)
    p.add_argument('--archs', type=int, default=1000, help='architectures to rank, drawn at random')
    p.add_argument('--n-images', type=int, help='use only so many images')
    p.add_argument('--cells', type=int, default=5, help='cells in a stage')
    p.add_argument('--width', type=int, default=16, help='channels of the first stage')
    p.add_argument('--preset', choices=['paper'], help='paper: nothing of ours')
    p.add_argument('--seed', type=int, default=0)
    args = p.parse_args()
    truth = read_nb201(args.truth)
    dls = cifar(args.images, args.bs, args.n_images, 0)
    learn = kshot_learner(dls, partial(nb201_supernet, n=args.cells, c=args.width), k=args.k, warmup=min(5, args.epochs//4), preset=args.preset, seed=args.seed)
    learn.fit_kshot(args.epochs, lr=args.lr, checkpoint=f'runs/nb201_k{args.k}_seed{args.seed}')
    archs = [truth.index[i] for i in np.random.default_rng(args.seed).permutation(len(truth))[:args.archs]]
    pred = learn.eval_archs(archs).accuracy
    known = truth.loc[archs]
    print(rank_report(pred.to_numpy(), known['cifar10_test'].to_numpy(), cost=known[['params_M', 'flops_M']].reset_index(drop=True)))
