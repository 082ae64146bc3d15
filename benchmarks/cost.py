"""What K-shot weight sharing costs, as ratios within one run: time of a step, of an evaluation, memory, and growth.

    python benchmarks/cost.py              # the quick set: about five minutes; into runs/cost.json
    python benchmarks/cost.py --full       # more repetitions, every K, and how cost grows: about an hour; into nbs/data

Prints tables and writes them to a file (or to --out). What is compared takes turns on the same architectures
and images, and the fastest turn of each counts, so a busy machine matters little. Times are of the processor (one
thread), or of the clock where CUDA does the work. Each table has a process of its own, and each memory figure. While
times are measured malloc is told to keep what it has, as PyTorch does on GPUs: whether it gives memory back after a
step is luck.
"""
import argparse
import copy
import json
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from functools import partial

warnings.filterwarnings('ignore', message='.*torch.jit', category=FutureWarning)
os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ.setdefault('TORCHINDUCTOR_COMPILE_THREADS', '1')       # so that compiling is counted

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from fastai.data.core import DataLoaders
from fastai.losses import CrossEntropyLossFlat

from kshot_nas.cost import CostTable
from kshot_nas.learner import kshot_learner
from kshot_nas.mix import KLayer, Merge
from kshot_nas.mobilenet import mobilenet_supernet
from kshot_nas.nb201 import nb201_supernet
from kshot_nas.optimizer import phased_opt
from kshot_nas.score import KShotLearner
from kshot_nas.simplex import SimplexNet
from kshot_nas.space import Arch
from kshot_nas.tiny import tiny_supernet

# malloc shall not give memory back between steps
keep = dict(MALLOC_MMAP_THRESHOLD_=str(2**32), MALLOC_TRIM_THRESHOLD_=str(2**33), MALLOC_TOP_PAD_=str(2**28))
turns = 5                                     # how often each thing is measured; the quick set has fewer
device = 'cuda' if torch.cuda.is_available() else 'cpu'
spaces = {'MobileNet 224': mobilenet_supernet,
          'MobileNet 32':  partial(mobilenet_supernet, size=32, n_out=10, strides=(1,1,2,2,1,2,1)),
          'NAS-Bench-201': nb201_supernet,
          'digits':        partial(tiny_supernet, widths=True)}
spent = Counter()                             # seconds inside of what `timed` wraps

def clock() -> float:
    if device == 'cpu': return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()

def timed(name, f):
    "`f`, whose time is counted"
    def g(*args, **kwargs):
        t = clock()
        try: return f(*args, **kwargs)
        finally: spent[name] += clock()-t
    return g

KLayer.merged_params = timed('merge', KLayer.merged_params)        # a part of the forward pass
KShotLearner.code = timed('code', KShotLearner.code)
Merge.backward = staticmethod(timed('shares', Merge.backward))     # a part of the backward pass: gradients of K items

def batch(net, bs): return torch.randn(bs, *net.in_shape, device=device),torch.randint(0, 10, (bs,), device=device)
def sgd(params): return phased_opt([params, [], []]).opt.opts[0]           # what the learner trains items with

class Items:
    "Steps for the items, timed by part"
    def __init__(self, net):
        self.net,self.opt = net.to(device),sgd(net.parameters())
        net.mixer.pace = True                                                  # as the learner has it
        self.lam = torch.full((net.k,), 1/net.k, device=device)
    def __call__(self, arch, x, y) -> dict:
        self.net.switch(arch, self.lam)
        self.opt.zero_grad()
        spent.clear()
        t = [clock()]
        loss = F.cross_entropy(self.net(x), y)
        t.append(clock())
        loss.backward()
        t.append(clock())
        self.opt.step()
        t.append(clock())
        parts = dict(zip(('forward', 'backward', 'optimizer'), np.diff(t)), merge=spent['merge'], shares=spent['shares'])
        return dict(step=t[-1]-t[0], **parts)

class Codes:
    "Steps for the codes, as `AlternatingTraining` makes them"
    def __init__(self, net): self.net,self.coder = net.to(device),SimplexNet(net.space, net.k).to(device)
    def __call__(self, archs, x, y) -> dict:
        spent.clear()
        t = [clock()]
        with self.net.frozen(): loss = F.cross_entropy(self.net.forward_paths(x, archs, self.coder(archs)), y)
        t.append(clock())
        loss.backward()
        t.append(clock())
        parts = dict(zip(('forward', 'backward'), np.diff(t)), merge=spent['merge'], shares=spent['shares'])
        return dict(step=t[-1]-t[0], **parts)

def ratios(rows:list, base:str, what='step') -> pd.DataFrame:
    "Median over architectures of the ratio to `base`, its quartiles, and median milliseconds, of the fastest turns"
    df = pd.DataFrame(rows).groupby(['run', 'arch'], as_index=False).min()
    runs = sorted(set(df.run), key=lambda r: ('plain' in r, len(r), r))
    by = df.pivot(index='arch', columns='run', values=what)[runs]
    r = by.div(by[base], axis=0)
    times = [c for c in df if c not in ('run', 'arch')]
    res = {'ratio': r.median(), 'lower quartile': r.quantile(0.25), 'upper quartile': r.quantile(0.75)}
    return pd.DataFrame(res).join(1000*df.groupby('run')[times].median())

def by_hand(net, arch):
    "The network that a PyTorch user would write for `arch`: plain layers, channels-last, in training mode"
    return net.subnet(arch).to(memory_format=torch.channels_last).train()

def last(x): return x.contiguous(memory_format=torch.channels_last)

def items_step(space, bs, n, ks) -> pd.DataFrame:
    "A step for the items with each K, in the layout of before, in half precision, and of the network written by hand"
    nets = {f'K={k}': spaces[space](k) for k in ks}
    nets[f'K={ks[-1]}, channels-first'] = spaces[space](ks[-1], channels_last=False)
    steps = {name: Items(net) for name,net in nets.items()}
    half,net = f'K={ks[-1]}, bf16',nets['K=1']
    steps[half],rows,rng = steps[f'K={ks[-1]}'],[],np.random.default_rng(0)
    x,y = batch(net, bs)
    def plain(model, opt):
        opt.zero_grad()
        t = clock()
        F.cross_entropy(model(last(x)), y).backward()
        opt.step()
        return clock()-t
    for i,arch in enumerate(net.space.sample(n, seed=0)):
        model = by_hand(net, arch)
        opt = sgd(model.parameters())
        for turn in range(turns):                       # the first one makes momentum and kernels, and does not count
            for name in rng.permutation([*steps, 'plain network']):
                if name == 'plain network': row = dict(step=plain(model, opt))
                else:
                    with torch.autocast(device, torch.bfloat16, enabled=name == half): row = steps[name](arch, x, y)
                if turn: rows.append(dict(run=name, arch=i, **row))
    return ratios(rows, 'K=1').assign(**{'ratio to plain': ratios(rows, 'plain network').ratio})

def codes_step(space, bs, n) -> pd.DataFrame:
    "A step for the codes, with as many architectures as by default, against the mean of steps for the items with these, on one batch"
    items,n_paths = Items(spaces[space](8)),min(16, max(1, bs//16))
    codes,rows = Codes(items.net),[]
    x,y = batch(items.net, bs)
    for i in range(n):
        archs = items.net.space.sample(n_paths, seed=0, start=i*n_paths)
        for turn in range(max(2, turns-2)):             # the first one pays for kernels and momentum
            both = dict(items=pd.DataFrame([items(a, x, y) for a in archs]).mean().to_dict(), codes=codes(archs, x, y))
            if turn: rows += [dict(run=name, arch=i, **parts) for name,parts in both.items()]
    return ratios(rows, 'items')

def evaluation(space, bs, n, n_batches=4) -> pd.DataFrame:
    """Evaluating an architecture: by a learner, by its supernet alone, which merges first, and by the network written by
    hand; loss and accuracy on the same images, laid out once"""
    (x,y),k = batch(spaces[space](1), n_batches*bs),8
    dls = DataLoaders.from_dsets(*[list(zip(x.cpu(), y.cpu()))]*2, bs=bs, num_workers=0, device=device)
    learn = kshot_learner(dls, spaces[space], k=k, n_out=10, loss_func=CrossEntropyLossFlat())
    nets = {'K=8': learn.net, 'K=1': spaces[space](1), 'K=8, channels-first': spaces[space](k, channels_last=False)}
    nets,rows,rng = {name: net.to(device).eval() for name,net in nets.items()},[],np.random.default_rng(0)
    kept = learn.batches(1)
    learn.model.eval()
    def by_hand_too(model, batches):
        with torch.inference_mode():
            preds = [(model(x), y) for x,y in batches]
            return [(F.cross_entropy(p, y).item(), (p.argmax(1) == y).float().mean().item()) for p,y in preds]
    for i,arch in enumerate(learn.space.sample(n, seed=1)):
        models = {'learner': None, 'plain network': by_hand(learn.net, arch)} | nets   # batch statistics everywhere
        for turn in range(turns):
            for name in rng.permutation(list(models)):
                batches = [(x.contiguous(), y) for x,y in kept] if 'first' in name else kept
                spent.clear()
                t = clock()
                if name == 'learner': learn.eval_arch(arch)
                else:
                    if name in nets: nets[name].switch(arch, torch.full((nets[name].k,), 1/nets[name].k, device=device))
                    by_hand_too(models[name], batches)
                if turn: rows.append(dict(run=name, arch=i, step=clock()-t, merge=spent['merge'], code=spent['code']))
    return ratios(rows, 'plain network').assign(**{'ratio to K=1': ratios(rows, 'K=1').ratio})

def compiled(space, bs, n) -> pd.DataFrame:
    "A step of a plain network as it is and compiled, the seconds that compiling takes, and the steps after which it has paid"
    net,rows = spaces[space](1),[]
    x,y = batch(net, bs)
    for i,arch in enumerate(net.space.sample(n, seed=3)):
        plain = by_hand(net, arch)
        fast = copy.deepcopy(plain)
        fast.compile()
        def step(model):
            t = clock()
            F.cross_entropy(model(last(x)), y).backward()
            return clock()-t
        before = sum(os.times()[:4])                    # those of the compilers that it starts, too
        step(fast)
        first = sum(os.times()[:4])-before
        times = [(step(plain), step(fast)) for _ in range(2*turns)]
        was,now = map(min, zip(*times))
        pays = (first-now)/(was-now) if now < was else np.inf
        rows.append({'arch': i, 'ms, plain': 1000*was, 'ms, compiled': 1000*now, 'ratio': now/was, 'seconds to compile': first-now,
                     'steps that pay for it': pays})
    return pd.DataFrame(rows).set_index('arch')

class Naive:
    """Steps that one would write first: K whole networks, all operations of all layers mixed each time,
    gradients for items and codes, an optimizer that goes over everything"""
    def __init__(self, net, k=8):
        self.net,self.k = net.to(device),k                                                   # lends its forward pass
        self.whole = {n:p.detach().expand(k, *p.shape[1:]).clone() for n,p in net.named_parameters()}
        for p in self.whole.values(): p.requires_grad_()
        self.opt = sgd(self.whole.values())
    def __call__(self, arch, x, y) -> dict:
        self.net.switch(arch)
        self.opt.zero_grad()
        t,lam = clock(),torch.full((self.k,), 1/self.k, device=device, requires_grad=True)
        mixed = {n:torch.tensordot(lam, p, 1)[None] for n,p in self.whole.items()}
        F.cross_entropy(torch.func.functional_call(self.net, mixed, x), y).backward()
        for p in self.whole.values():
            if p.grad is None: p.grad = torch.zeros_like(p)
        self.opt.step()
        return dict(step=clock()-t)

def naive(space, bs, n, k=8) -> pd.DataFrame:
    "The naive way against that of this library, and K=1"
    net = spaces[space](1)
    steps = {'K=1': Items(net), 'kshot_nas': Items(spaces[space](k)), 'naive': Naive(net, k)}
    rows,(x,y) = [],batch(net, bs)
    for i,arch in enumerate(net.space.sample(n, seed=2)):
        for turn in range(3):
            for name,step in steps.items():
                row = dict(run=name, arch=i, step=step(arch, x, y)['step'])
                if turn: rows.append(row)
    return ratios(rows, 'kshot_nas')

def resident(which) -> float:
    "Megabytes of this process in memory: now ('VmRSS') or at most so far ('VmHWM')"
    with open('/proc/self/status') as f: return next(int(l.split()[1])/1e3 for l in f if l.startswith(which))

def largest_arch(space) -> Arch:
    "The widest operations at full width"
    def widest(names): return names.index('k7_e6_se' if 'k7_e6_se' in names else 'nor_conv_3x3')
    return Arch([widest(o) for o in space.ops], [len(r)-1 for r in space.widths])

def held(space, k, bs, what) -> dict:
    "Megabytes of a step: items, momentum, gradients, what the backward pass needs, and the growth of the process"
    before = resident('VmRSS')
    with open('/proc/self/clear_refs', 'w') as f: f.write('5')                # the peak counts from here
    step = Naive(spaces[space](1), k) if what == 'naive' else Items(spaces[space](k))
    net,kept,sums = step.net,{},[]
    params = list(step.whole.values() if what == 'naive' else net.parameters())
    own = {p.untyped_storage().data_ptr() for p in params}
    archs,(x,y) = net.space.sample(16, seed=0),batch(net, bs)
    def pack(t):
        if (s := t.untyped_storage()).data_ptr() not in own: kept[s.data_ptr()] = s.nbytes()
        return t
    def leave(m, args, out):
        sums.append(sum(kept.values()))
        kept.clear()
    net.register_forward_hook(leave)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        if what == 'codes': Codes(net)(archs, x, y)
        else:
            for a in [largest_arch(net.space)] if what == 'largest' else archs[:4]: step(a, x, y)
    def mb(ts): return sum(t.numel()*t.element_size() for t in ts)/1e6
    return dict(items=mb(params), momentum=mb(params)*(what != 'codes'),       # of all items, once all were trained
                gradients=mb(p.grad for p in params if p.grad is not None),
                kept=(max(sums) if what == 'codes' else np.mean(sums))/1e6, peak=resident('VmHWM')-before)

def memory(space, bs, whats, ks=(1, 8)) -> pd.DataFrame:
    "`held`, each in a process of its own, and ratios to K=1"
    rows = {f'K={k}': (k, 'items') for k in ks} | {f'K={ks[-1]}, {what}': (ks[-1], what) for what in whats}
    env = {n:v for n,v in os.environ.items() if n not in keep}
    def child(k, what):
        cmd = [sys.executable, __file__, '--held', space, str(k), str(bs), what]
        return json.loads(subprocess.run(cmd, stdout=subprocess.PIPE, text=True, check=True, env=env).stdout)
    df = pd.DataFrame({name: child(*r) for name,r in rows.items()}).T
    df['sum'] = df[['items', 'momentum', 'gradients', 'kept']].sum(axis=1)
    return df.assign(ratio=df['sum']/df['sum'].iloc[0], **{'ratio of peaks': df.peak/df.peak.iloc[0]})

def growth(n=5) -> pd.DataFrame:
    "Time of a step on a small space as one thing grows, in multiples of the first value, beside what theory says"
    def run(bs=32, k=8, n_paths=None, **kw):
        net = tiny_supernet(k, n_in=3, **{'size': 32, 'nf': 32, **kw})
        x,y = batch(net, bs)
        step = Codes(net) if n_paths else Items(net)
        def spent(i):
            archs = net.space.sample(n_paths or 1, seed=i)
            return step(archs if n_paths else archs[0], x, y)['step']
        return np.mean([spent(i) for i in range(4*n)][n:])
    what = {'k': (1, 2, 4, 8, 16, 32), 'n_layers': (3, 6, 12, 24), 'nf': (16, 32, 64, 128), 'size': (16, 32, 64, 128),
            'n_paths': (1, 2, 4, 8, 16, 32)}
    return pd.DataFrame([dict(what=w, value=v, seconds=run(**{w: v})) for w,vs in what.items() for v in vs])

def machinery() -> pd.DataFrame:
    "Seconds for what a search does very often"
    space,table = (net := mobilenet_supernet(1)).space,CostTable(net)
    index,archs = space.sample(10**6, seed=0, as_index=True),space.sample(10**5, seed=0)
    jobs = {'FLOPs of 1,000,000 (an index)': lambda: table.flops(index),
            'sample 1,000,000 (an index)': lambda: space.sample(10**6, seed=0, as_index=True),
            'FLOPs of 100,000': lambda: table.flops(archs),
            'sample 100,000': lambda: space.sample(10**5, seed=0),
            'encode 100,000': lambda: space.encode(archs)}
    def seconds(f):
        t = time.perf_counter()
        f()
        return time.perf_counter()-t
    return pd.DataFrame({'seconds': {n: np.median([seconds(f) for _ in range(3)]) for n,f in jobs.items()}})

def tables(full:bool) -> dict:
    "What makes each table, by its title; the quick set leaves out what takes long"
    n,ks = (4, (1, 2, 4, 8, 12)) if full else (1, (1, 8))
    sizes,jobs = [('NAS-Bench-201', 128), ('MobileNet 32', 128), ('MobileNet 224', 16)],{}
    for s,bs in sizes:
        few = (n//2 or 1, (1, 8)) if s == 'MobileNet 224' else (n, ks)      # a step takes seconds
        jobs[f'step for the items, {s}, batch {bs}'] = partial(items_step, s, bs, *few)
    if full:
        jobs['step for the items, MobileNet 224, batch 64'] = partial(items_step, 'MobileNet 224', 64, 1, (1, 8))
        jobs['step for the codes, MobileNet 224, batch 64'] = partial(codes_step, 'MobileNet 224', 64, 1)
    jobs['evaluation, digits, batch 500'] = partial(evaluation, 'digits', 500, 20, 1)
    jobs['step for the codes, digits, batch 50'] = partial(codes_step, 'digits', 50, 20)
    for s,bs in sizes if full else sizes[:2]:
        jobs[f'evaluation, {s}, batch {bs}'] = partial(evaluation, s, bs, n, 2)
    for s,bs in sizes if full else sizes[:1]:
        jobs[f'step for the codes, {s}, batch {bs}'] = partial(codes_step, s, bs, n//3 or 1)
        if full: jobs[f'compiled, {s}, batch {bs}'] = partial(compiled, s, bs, 2)
    for s,bs in [('MobileNet 32', 16)] + [('NAS-Bench-201', 16)]*full:
        jobs[f'the naive way, {s}, batch {bs}'] = partial(naive, s, bs, n)
    large = ('NAS-Bench-201', 128), ('MobileNet 224', 4), ('MobileNet 224', 16), ('MobileNet 224', 32)
    for s,bs in large if full else [('MobileNet 224', 8)]:
        jobs[f'megabytes, {s}, batch {bs}'] = partial(memory, s, bs, ('codes', 'naive', 'largest')*full)
    return jobs | {'machinery': machinery} | ({'growth': growth} if full else {})

def save(title, df, out):
    "Write a table to the file `out`; those measured before are kept"
    before = {}
    if os.path.exists(out):
        with open(out) as f: before = json.load(f)['tables']
    after = before | {title: json.loads(df.to_json(orient='split'))}
    res = dict(device=device, torch=torch.__version__, tables=after)
    with open(f'{out}.tmp', 'w') as f: json.dump(res, f, indent=1)
    os.replace(f'{out}.tmp', out)

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--full', action='store_true', help='the long set')
    p.add_argument('--only', default='', help='only tables whose title contains this')
    p.add_argument('--out', help='where to write the tables')
    p.add_argument('--table', help=argparse.SUPPRESS)
    p.add_argument('--held', nargs=4, help=argparse.SUPPRESS)
    args = p.parse_args()
    torch.set_num_threads(1)
    if args.held: return print(json.dumps(held(args.held[0], int(args.held[1]), int(args.held[2]), args.held[3])))
    global turns
    turns,jobs = 5 if args.full else 3,tables(args.full)
    out = args.out or ('nbs/data/cost.json' if args.full else 'runs/cost.json')
    if args.table:
        df = jobs[args.table]()
        print(f'\n{args.table}\n{df.round(3).to_string()}', flush=True)
        return save(args.table, df, out)
    os.makedirs(os.path.dirname(out) or '.', exist_ok=True)
    for title in jobs:                                  # a process for each: none inherits the memory of another
        if args.only in title:                          # malloc reads its settings at the start
            subprocess.run([sys.executable, *sys.argv, '--table', title], env={**os.environ, **keep}, check=True)

if __name__ == '__main__': main()
