"""What a step for the codes costs beside a step for the items: all groups in one graph, or one group at a time.

    python benchmarks/code_step.py                       # a table, in about ten minutes
    python benchmarks/code_step.py --out code_step.json  # and the same for a program

On the MobileNetV2-SE space with K=8 and widths. A step for the codes cuts the batch into m groups, one for each of m
architectures, and finds the gradient of the simplex-net by which it codes them; the items take part as constants.
It is compared with the mean step for the items (forward, backward, SGD) over the same architectures, on the same batch.
Times are of one thread of the processor: in one process all kinds take turns, and the fastest of three turns counts.
Memory is what a process of its own grows by, at the peak of a step, over what it held before the step: items and
momentum are not in it, the gradients of a path's items are.
"""
import argparse
import json
import os
import subprocess
import sys
import time

os.environ.setdefault('OMP_NUM_THREADS', '1')

import pandas as pd
import torch
import torch.nn.functional as F

from kshot_nas.mobilenet import mobilenet_supernet
from kshot_nas.simplex import SimplexNet

sizes = {64: 64, 224: 32}                        # side of the images: images in a batch
n_groups = 4,16
# malloc keeps what it has while times are measured, and gives back everything at once while memory is
keep = dict(MALLOC_MMAP_THRESHOLD_=str(2**32), MALLOC_TRIM_THRESHOLD_=str(2**33), MALLOC_TOP_PAD_=str(2**28))
give = dict(MALLOC_MMAP_THRESHOLD_=str(2**16), MALLOC_TRIM_THRESHOLD_=str(2**16))

def freeze_items(net, on:bool):
    "Let the items take part as constants, or no longer"
    for p in net.parameters(): p.requires_grad_(not on)

class Steps:
    "The kinds of steps that are compared, on one supernet and one batch"
    def __init__(self, size):
        torch.manual_seed(0)
        self.net,bs = mobilenet_supernet(8, size=size),sizes[size]
        self.coder = SimplexNet(self.net.space, 8)
        self.opt = torch.optim.SGD(self.net.parameters(), 0.01, momentum=0.9, nesterov=True, fused=True)
        for p in self.net.parameters(): self.opt.state[p]['momentum_buffer'] = torch.full_like(p, 0.)   # held before
        self.x,self.y = torch.randn(bs, *self.net.in_shape),torch.randint(0, 10, (bs,))

    def items(self, arch):
        "One path, forward and backward, and an SGD step on its items"
        self.net.switch(arch, torch.full((8,), 1/8))
        F.cross_entropy(self.net(self.x), self.y).backward()
        self.opt.step()

    def groups(self, archs, lams):
        "Labels and outputs of one group after another"
        for x,y,arch,lam in zip(self.x.tensor_split(len(archs)), self.y.tensor_split(len(archs)), archs, lams):
            self.net.switch(arch, lam)
            yield y,self.net(x)

    def one_graph(self, archs):
        "All groups in one graph, one backward pass"
        freeze_items(self.net, True)
        preds = torch.cat([pred for _,pred in self.groups(archs, self.coder(archs))])
        F.cross_entropy(preds, self.y).backward()
        freeze_items(self.net, False)

    def one_at_a_time(self, archs):
        "A backward pass for each group, which frees its graph before the next begins"
        freeze_items(self.net, True)
        lams = self.coder(archs)
        leaf = lams.detach().requires_grad_()
        for y,pred in self.groups(archs, leaf): (F.cross_entropy(pred, y)*len(y)/len(self.y)).backward()
        lams.backward(leaf.grad)
        freeze_items(self.net, False)

    def clear(self):
        self.opt.zero_grad()
        self.coder.zero_grad()

def seconds(f, *args) -> float:
    start = time.process_time()
    f(*args)
    return time.process_time() - start

def times(size) -> dict:
    "Seconds of each kind of step; those for the items as the mean over the same architectures"
    steps,res = Steps(size),{}
    archs = steps.net.space.sample(max(n_groups), seed=0)
    for turn in range(3):
        def note(name, f, *args):
            steps.clear()
            res[name] = min(seconds(f, *args), res.get(name, float('inf')))
        for m in n_groups:
            note(f'one graph, m={m}', steps.one_graph, archs[:m])
            note(f'one at a time, m={m}', steps.one_at_a_time, archs[:m])
        for i,arch in enumerate(archs): note(i, steps.items, arch)
    each = [res.pop(i) for i in range(len(archs))]
    return res | {f'items, m={m}': sum(each[:m])/m for m in n_groups}

def resident(which) -> float:
    "Megabytes of this process in memory: now ('VmRSS'), or at most since `clear_refs` ('VmHWM')"
    with open('/proc/self/status') as f: return next(int(l.split()[1])/1e3 for l in f if l.startswith(which))

def peak(size, kind, m) -> float:
    "Megabytes that a step needs at its peak, over what was held before; for the items the mean over the architectures"
    steps = Steps(size)
    archs,res = steps.net.space.sample(m, seed=0),[]
    todo = archs[:4] if kind == 'items' else [archs]
    for args in [todo[0], *todo]:                           # the first one makes kernels, and does not count
        steps.clear()
        before = resident('VmRSS')
        with open('/proc/self/clear_refs', 'w') as f: f.write('5')
        getattr(steps, kind.replace(' ', '_'))(args)
        res.append(resident('VmHWM') - before)
    return sum(res[1:])/len(todo)

def child(*args, **env):
    "What this script measures in a process of its own"
    cmd = [sys.executable, __file__, '--measure', *map(str, args)]
    return json.loads(subprocess.run(cmd, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | env).stdout)

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--out', help='write the numbers to this file as JSON')
    p.add_argument('--measure', nargs='+', help=argparse.SUPPRESS)
    args = p.parse_args()
    torch.set_num_threads(1)
    if args.measure:
        size,kind,*m = args.measure
        return print(json.dumps(times(int(size)) if kind == 'times' else peak(int(size), kind, int(m[0]))))
    rows = []
    for size,bs in sizes.items():
        spent = child(size, 'times', **keep)
        for m in n_groups:
            for kind in ('items', 'one graph', 'one at a time'):
                mb = child(size, kind, m, **give)
                rows.append(dict(size=size, batch=bs, m=m, kind=kind, seconds=spent[f'{kind}, m={m}'], peak_mb=mb))
    df = pd.DataFrame(rows)
    base = df[df.kind == 'items'].set_index(['size', 'm'])
    at = pd.MultiIndex.from_frame(df[['size', 'm']])
    for what,ratio in ('seconds', 'time ratio'),('peak_mb', 'memory ratio'):
        df[ratio] = df[what]/base[what].reindex(at).to_numpy()
    print(df.round(3).to_string(index=False))
    if args.out:
        with open(args.out, 'w') as f: json.dump(dict(torch=torch.__version__, rows=df.to_dict('records')), f, indent=1)

if __name__ == '__main__': main()
