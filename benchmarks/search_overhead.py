"""What the machinery of a search costs per evaluation: the operators, pymoo, the costs, the archive.

The evaluator is free, so all of the time is the machinery's. The space is the paper's, 13^21 * 5^24 architectures.

    python benchmarks/search_overhead.py            # a table
    python benchmarks/search_overhead.py --json     # the same for a program
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

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', action='store_true', help='print JSON')
    parser.add_argument('--gens', type=int, default=20, help='generations of 50 architectures (the paper has 20)')
    parser.add_argument('--repeats', type=int, default=3, help='searches of each kind; the fastest counts')
    args = parser.parse_args()
    torch.set_num_threads(1)
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
