"""What the machinery of a search costs per evaluation: the operators, pymoo, the costs, the archive.

The evaluator is free, so all of the time is the machinery's. The space is the paper's, 13^21 * 5^24 architectures.

    python benchmarks/search_overhead.py            # a table
    python benchmarks/search_overhead.py --json     # the same for a program
    python benchmarks/search_overhead.py --digits   # a whole search instead: 1,000 architectures of the tiny space with
                                                    # widths, K=8, on 500 digits
"""
import argparse
import json
import os
import tempfile
import time
import warnings
from pathlib import Path

warnings.filterwarnings('ignore', message='.*torch.jit', category=FutureWarning)
os.environ.setdefault('OMP_NUM_THREADS', '1')

import torch

from kshot_nas.cost import CostTable
from kshot_nas.mobilenet import mobilenet_supernet
from kshot_nas.problem import ArchProblem
from kshot_nas.search import search

def free(arch): return sum(arch.widths) - sum(arch.ops)

def measure(problem, folder, name, repeats, **kwargs):
    "Milliseconds per evaluation: processor time, and time on the clock, of the fastest of some searches"
    times = []
    for seed in range(repeats):
        archive = folder/f'{name}_{seed}.db' if 'archive' in name else None
        clock,cpu = time.perf_counter(),time.process_time()
        result = search(problem, max_flops=330e6, seed=seed, progress=False, archive=archive, **kwargs)
        times.append((time.process_time()-cpu, time.perf_counter()-clock, len(result.history)))
    return {unit: 1000*min(t[i]/t[2] for t in times) for i,unit in enumerate(('cpu_ms', 'clock_ms'))}

def digits(n_gens):
    "Seconds of the processor for a whole search on the digits, evaluations included (the weights don't matter)"
    from fastai.data.core import DataLoaders
    from fastai.losses import CrossEntropyLossFlat
    from sklearn.datasets import load_digits
    from kshot_nas.learner import kshot_learner
    from kshot_nas.tiny import tiny_supernet
    x,y = load_digits(return_X_y=True)
    pairs = list(zip(torch.tensor(x).float().view(-1, 1, 8, 8)/8 - 1, torch.tensor(y)))
    dls = DataLoaders.from_dsets(pairs[:1000], pairs[-500:], bs=50, num_workers=0, device='cpu')
    learn = kshot_learner(dls, tiny_supernet, k=8, n_out=10, loss_func=CrossEntropyLossFlat(), widths=True)
    t = time.process_time()
    found = learn.search(gens=n_gens, progress=False)
    return time.process_time()-t,len(found.history)

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', action='store_true', help='print JSON')
    parser.add_argument('--gens', type=int, default=20, help='generations of 50 architectures (the paper has 20)')
    parser.add_argument('--repeats', type=int, default=3, help='searches of each kind; the fastest counts')
    parser.add_argument('--digits', action='store_true', help='a whole search on the digits')
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.digits:
        seconds,n = digits(args.gens)
        return print(f'{n} architectures on the digits: {seconds:.1f} s of one processor, {1000*seconds/n:.1f} ms each')
    net = mobilenet_supernet(k=1)
    problem = ArchProblem(net.space, free, CostTable(net))
    with tempfile.TemporaryDirectory() as folder:
        res = {name: measure(problem, Path(folder), name, args.repeats, gens=args.gens, how=how)
               for name,how in (('nsga2', 'nsga2'), ('nsga2 with archive', 'nsga2'), ('random with archive', 'random'))}
    n = 50*args.gens
    if args.json: return print(json.dumps(dict(evaluations=n, torch=torch.__version__, ms_per_evaluation=res)))
    print(f'{n} evaluations that cost nothing, milliseconds for each:\n{"":22}{"processor":>10}{"clock":>10}')
    for name,t in res.items(): print(f'{name:22}{t["cpu_ms"]:10.2f}{t["clock_ms"]:10.2f}')

if __name__ == '__main__': main()
