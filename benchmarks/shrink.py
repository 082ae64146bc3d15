"""Half the FLOPs of a trained ResNet-18 on a folder of images: by a search, and by the plain ways with as much training

Each way but `short` sees as many images, 14 epochs in all. All but `fresh` begin with the same network, trained for 6:
  full      the network itself, trained for 8 more
  searched  a supernet of its depths and widths for 4, a search within the budget, the winner for 4
  random    two random architectures of the budget, cut out of it, for 2 each, the better one for 4 more
  uniform   all hidden widths cut by the same ratio, for 8
  short     the same, for no more than the winner of the search: 4
  fresh     the same uniform network, but drawn anew, for 14
Writes nbs/data/shrink.csv: python benchmarks/shrink.py [--seeds 0 1] [--ways ...]; five minutes a seed on one core.
"""
import argparse, tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from fastai.vision.all import (CategoryBlock, DataBlock, GrandparentSplitter, ImageBlock, Learner, Normalize, accuracy,
                               get_image_files, imagenet_stats, parent_label, set_seed)
from PIL import Image, ImageDraw
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import resnet18

from kshot_nas.cost import CostTable
from kshot_nas.elastic import elastic_supernet
from kshot_nas.learner import kshot_learner
from kshot_nas.optimizer import phased_opt
from kshot_nas.space import Arch

kinds = 'circle', 'ring', 'triangle', 'square', 'diamond', 'star', 'cross', 'arrow'
turn = np.pi
corners = dict(triangle=(np.arange(3)*2*turn/3, [1]*3), square=(np.arange(4)*turn/2, [1]*4),
               diamond=(np.arange(4)*turn/2, [1, 0.5]*2), star=(np.arange(10)*turn/5, [1, 0.45]*5),
               cross=([a + b for a in np.arange(4)*turn/2 for b in (-0.3, 0.3, turn/4)], [1, 1, 0.42]*4),
               arrow=([0, 2.4, turn, -2.4], [1, 1, 0.3, 1]))


def draw(kind, rng, size=32, large=128):
    "A shape in some colour, place, size and angle, with two lines across and noise"
    img = Image.new('RGB', (large, large), tuple(rng.integers(0, 110, 3).tolist()))
    pen,(r,angle) = ImageDraw.Draw(img),rng.uniform((34, -0.5), (56, 0.5))
    def colour(): return tuple(rng.integers(120, 256, 3).tolist())
    for _ in range(2): pen.line(rng.integers(0, large, 4).tolist(), colour(), int(rng.integers(2, 7)))
    at = rng.uniform(r, large-r, 2)
    if kind == 'circle': pen.ellipse([*(at - 0.85*r), *(at + 0.85*r)], colour())
    elif kind == 'ring': pen.ellipse([*(at - 0.85*r), *(at + 0.85*r)], None, colour(), int(0.35*r))
    else: pen.polygon([tuple(at + r*q*np.array([np.cos(angle + a), np.sin(angle + a)])) for a,q in zip(*corners[kind])],
                      colour())
    x = np.asarray(img.resize((size, size), Image.BOX)) + rng.normal(0, 12, (size, size, 3))
    return Image.fromarray(x.clip(0, 255).astype('uint8'))


def make_folder(path, n=dict(train=1600, valid=400, test=1600)):
    "A folder of images for each part and kind"
    rng = np.random.default_rng(0)
    for part,n_images in n.items():
        for i in range(n_images):
            (folder := Path(path)/part/kinds[i % 8]).mkdir(parents=True, exist_ok=True)
            draw(kinds[i % 8], rng).save(folder/f'{i:04}.png')


class Ways:
    "Ways to half the FLOPs, each a method that gives a trained network"
    def __init__(self, path, seed):
        self.seed,self.path = seed,path
        def images(path): return sorted(get_image_files(path, folders=['train', 'valid']))
        block = DataBlock((ImageBlock, CategoryBlock), get_items=images, splitter=GrandparentSplitter(),
                          get_y=parent_label, batch_tfms=Normalize.from_stats(*imagenet_stats))
        self.dls = block.dataloaders(path, bs=64, num_workers=0)
        set_seed(seed)
        self.model = self.fit(resnet18(num_classes=8), 6, 3e-3)
        self.net = elastic_supernet(self.model, k=2, in_shape=(3, 32, 32), order='norm')
        self.table = CostTable(self.net)
        self.budget = self.table.flops_range()[1]/2

    def learner(self, model): return Learner(self.dls, model, metrics=accuracy)

    def fit(self, model, n_epoch, lr=1e-3):
        learn = self.learner(model)
        with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(n_epoch, lr)
        return learn.model

    def score(self, model, test=True):
        "Accuracy on the test images, or on those for validation"
        dl = self.dls.test_dl(sorted(get_image_files(self.path/'test')), with_labels=True) if test else self.dls.valid
        learn = self.learner(model)
        with learn.no_bar(): return learn.validate(dl=dl)[1]

    def uniform_net(self):
        "A supernet whose smallest widths are uniform and within the budget, and its smallest architecture"
        for ratio in np.arange(0.5, 0.2, -0.01):
            net = elastic_supernet(self.model, k=1, in_shape=(3, 32, 32), order='norm', widths=(ratio, 1.0))
            arch = Arch([0]*len(net.space.ops), [0]*len(net.space.widths))
            if CostTable(net).flops([arch]).item() <= self.budget: return net,arch

    def full(self):
        arch = Arch([0]*len(self.net.space.ops), [3]*len(self.net.space.widths))
        return self.fit(self.net.subnet(arch), 8)
    def uniform(self):
        net,arch = self.uniform_net()
        return self.fit(net.subnet(arch), 8)
    def short(self):
        net,arch = self.uniform_net()
        return self.fit(net.subnet(arch), 4)
    def fresh(self):
        net,arch = self.uniform_net()
        model = net.subnet(arch, weights='fresh')
        for m in model.modules():                                                  # as torchvision draws them
            if isinstance(m, nn.Conv2d): nn.init.kaiming_normal_(m.weight, mode='fan_out', nonlinearity='relu')
        return self.fit(model, 14, 3e-3)
    def random(self):
        archs = self.net.space.sample(5000, seed=self.seed)
        flops = self.table.flops(archs)
        near = [a for a,f in zip(archs, flops.tolist()) if 0.9*self.budget <= f <= self.budget][:2]
        models = [self.fit(self.net.subnet(a), 2) for a in near]
        return self.fit(max(models, key=lambda m: self.score(m, test=False)), 4)
    def searched(self):
        adam = partial(phased_opt, items=torch.optim.Adam, codes_scale=1.)
        learn = kshot_learner(self.dls, self.net, warmup=1, seed=self.seed, opt_func=adam, ratio=(3,1))
        with learn.no_bar(), learn.no_logging(): learn.fit_kshot(4, lr=1e-3)
        found = learn.search(max_flops=self.budget, pop=16, gens=4, parents=8, progress=False)
        model = learn.subnet(found.best)
        print(f'found {found.best}, inherited {self.score(model):.4f}')
        return self.fit(model, 4)


def macs(model):
    "Multiply-adds of convolutions and linear layers"
    with FlopCounterMode(display=False) as c, torch.no_grad(): model.eval()(torch.zeros(1, 3, 32, 32))
    return c.get_total_flops()/2e6


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--seeds', type=int, nargs='*', default=[0, 1], help='their rows are replaced')
    parser.add_argument('--ways', nargs='*', default=['searched', 'random', 'uniform', 'short', 'fresh', 'full'])
    args,out = parser.parse_args(),Path(__file__).parent.parent/'nbs/data/shrink.csv'
    rows = pd.read_csv(out).to_dict('records') if out.exists() else []
    rows = [r for r in rows if r['seed'] not in args.seeds or r['way'] not in args.ways]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_folder(folder)
        for seed in args.seeds:
            ways = Ways(Path(folder), seed)
            start = ways.score(ways.model)
            for way in args.ways:
                set_seed(seed)
                model = getattr(ways, way)()
                rows.append(dict(way=way, seed=seed, accuracy=round(ways.score(model), 4), start=round(start, 4),
                                 MFLOPs=round(macs(model), 2),
                                 params_M=round(sum(p.numel() for p in model.parameters())/1e6, 2)))
                print(rows[-1], flush=True)
            pd.DataFrame(rows).sort_values('seed', kind='stable').to_csv(out, index=False)
