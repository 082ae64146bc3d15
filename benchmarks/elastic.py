"""Which networks elastic_supernet takes, what it finds in them, and why not: writes nbs/data/elastic.csv

python benchmarks/elastic.py [--only NAME ...]: about five minutes on one core; needs kshot_nas[timm]
"""
import argparse, time, warnings
from pathlib import Path

import pandas as pd
import torch
from torch import nn

from kshot_nas.cost import CostTable
from kshot_nas.elastic import _find, elastic_supernet
from kshot_nas.space import Arch

names = [f'torchvision:{n}' for n in (
    'resnet18', 'resnet50', 'mobilenet_v2', 'mobilenet_v3_small', 'efficientnet_b0', 'efficientnet_v2_s',
    'convnext_tiny', 'regnet_y_400mf', 'densenet121', 'shufflenet_v2_x1_0', 'vit_b_16', 'swin_t')]
names += [f'timm:{n}' for n in (
    'resnet18', 'mobilenetv3_small_100', 'efficientnet_b0', 'tf_efficientnet_b0', 'convnext_atto',
    'vit_tiny_patch16_224')]
odd = ['torchvision:vgg11_bn', 'torchvision:squeezenet1_1', 'torchvision:googlenet', 'torchvision:maxvit_t',
       'timm:swin_tiny_patch4_window7_224', 'timm:mixer_s16_224', 'timm:levit_128s', 'timm:nf_regnet_b0',
       'timm:hrnet_w18_small', 'timm:sequencer2d_s', 'timm:volo_d1_224']


def wear(model, in_shape):
    "Make no two channels alike, and fill the statistics of norms"
    torch.manual_seed(0)
    for p in model.parameters():
        if p.std() == 0 or p.numel() == 1: nn.init.uniform_(p, 0.5, 1.5)
    with torch.no_grad():
        for _ in range(2): model.train()(torch.randn(4, *in_shape))
    return model.eval()


def reasons(plan):
    "What was left alone, as one line"
    lines = [o.strip().removeprefix('left alone: ') for o in repr(plan).splitlines()[1:]]
    return '; '.join(lines)


def gap(model, net, arch, x):
    "The largest difference between `model` and the architecture `arch` of `net`, relative to the largest output"
    with torch.no_grad(): want,got = model(x),net.use(arch)(x)
    return f'{((got - want).abs().max()/want.abs().max()).item():.0e}'


def row(name, size=224, k=2):
    "What becomes of one network"
    res,start = dict(network=name),time.time()
    torch.manual_seed(0)
    model = _find(name)[0]()
    res['params_M'] = round(sum(p.numel() for p in model.parameters())/1e6, 1)
    try:
        net = elastic_supernet(wear(model, (3, size, size)), k, in_shape=(3, size, size), running=True).eval()
        low,high = CostTable(net).flops_range()
    except Exception as e:
        first,*more = str(e).split(': change that')[0].splitlines()
        if len(more) > 1: more[1:] = [f'and {len(more)-1} more']
        return res | dict(converts=False, left_alone=' '.join([first, *(o.strip() for o in more)]))
    x,space = torch.randn(2, 3, size, size),net.space
    full,other = Arch([0]*len(space.ops), [len(r)-1 for r in space.widths]),space.sample(seed=0)[0]
    return res | dict(
        converts=True, blocks=len(space.ops), widths=len(space.widths), log10_size=round(len(str(space.size))-1),
        min_MFLOPs=round(low/1e6, 1), max_MFLOPs=round(high/1e6, 1), difference=gap(model, net, full, x),
        path_difference=gap(net.subnet(other).eval(), net, other, x), left_alone=reasons(net.plan),
        seconds=round(time.time()-start, 1))


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--only', nargs='*', help='networks to try, such as timm:resnet18; their rows are replaced')
    only,path = parser.parse_args().only,Path(__file__).parent.parent/'nbs/data/elastic.csv'
    torch.set_num_threads(1)
    warnings.filterwarnings('ignore')
    rows = {r['network']:r for r in pd.read_csv(path).to_dict('records')} if only and path.exists() else {}
    for name in only or names + odd:
        rows[name] = row(name)
        print(*rows[name].values(), flush=True)
        order = {n:i for i,n in enumerate(names + odd)}
        table = pd.DataFrame(sorted(rows.values(), key=lambda r: order.get(r['network'], len(order))))
        table.astype({c:'Int64' for c in ('blocks', 'widths', 'log10_size') if c in table}).to_csv(path, index=False)
