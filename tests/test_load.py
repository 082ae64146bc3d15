"Long searches and long trainings, whose memory must not grow and whose pace must not drop, and pictures of many points."
import gc
import json
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.losses import CrossEntropyLossFlat

from kshot_nas.callbacks import CodeRecorder
from kshot_nas.cost import CostTable
from kshot_nas.result import SearchResult
from kshot_nas.learner import kshot_learner
from kshot_nas.problem import ArchProblem, landscape
from kshot_nas.rank import rank_report
from kshot_nas.app.report import write_report
from kshot_nas.search import search
from kshot_nas.tiny import tiny_supernet

needs_proc = pytest.mark.skipif(not Path('/proc/self/status').exists(), reason='this system does not tell how much memory a process has')

def kilobytes():
    "Memory that this process has now"
    return next(int(l.split()[1]) for l in Path('/proc/self/status').read_text().splitlines() if l.startswith('VmRSS'))

def apart(f, *args):
    "What `f` returns in a process of its own, where nothing that others have freed can be used again"
    with get_context('spawn').Pool(1) as pool: return pool.apply(f, args)

# Search ----------------------------------------------------------------------------------------------------------------------

def long_search(gens, archive):
    "Memory and processor time, every 50 evaluations"
    torch.set_num_threads(1)
    net,marks,count = tiny_supernet(k=1, widths=True),[],0
    accuracy = landscape(net.space)
    def evaluate(arch):
        nonlocal count
        if count % 50 == 0: marks.append((kilobytes(), time.process_time()))
        count += 1
        return accuracy(arch)
    found = search(ArchProblem(net.space, evaluate, CostTable(net)), max_flops=200e3, gens=gens, archive=archive, progress=False)
    assert len(found.history) == count == 50*gens
    return marks

@needs_proc
@pytest.mark.parametrize('gens', [60, pytest.param(400, marks=pytest.mark.slow)])
def test_a_long_search_stays_small_and_quick(gens, tmp_path):
    memory,seconds = np.array(apart(long_search, gens, tmp_path/'a.db')).T
    assert memory[-1] < 1.1*memory[20] and memory[-1]-memory[20] < 2*50*(gens-20), 'more than 2 kB for an evaluation'
    pace = np.diff(seconds)
    assert np.median(pace[-20:]) < 3*np.median(pace[20:40]), 'generations take longer and longer'
    assert (tmp_path/'a.db').stat().st_size < 500*50*gens

# Training --------------------------------------------------------------------------------------------------------------------

def small_learner(n_steps):
    x,y = torch.randn(4*n_steps, 1, 8, 8),torch.arange(4*n_steps) % 3
    dls = DataLoaders.from_dsets(list(zip(x, y)), list(zip(x[:8], y[:8])), bs=4, num_workers=0, device='cpu')
    dls.c = 3
    return kshot_learner(dls, tiny_supernet, k=2, n_paths=2, warmup=1, nf=2, n_layers=2, widths=True, loss_func=CrossEntropyLossFlat())

class Watch(Callback):
    "Calls a function after every epoch, and keeps what it returns"
    order = 100
    def __init__(self, f): self.f,self.marks = f,[]
    def after_epoch(self): self.marks.append(self.f())

def fit(learn, n_epoch, f, **kwargs):
    with learn.no_bar(), learn.no_logging(): learn.fit_kshot(n_epoch, lr=0.01, cbs=(watch := Watch(f)), **kwargs)
    return watch.marks

def test_training_keeps_no_objects(tmp_path):
    "Numbers are kept of every step, and nothing that holds others: no tensor, no graph, no architecture."
    def objects():
        gc.collect()
        return len(gc.get_objects())
    n = np.diff(fit(small_learner(50), 6, objects, checkpoint=tmp_path))
    assert n[2:].max() < 40, f'{n} more objects after an epoch of 50 steps'

def test_the_mean_of_an_epoch_is_quick_after_many():
    rec = CodeRecorder()
    rec.learn = type('Learner', (), dict(epoch=9999))
    rec.steps = [(e, ('items', 'codes')[i % 2], float(e+i), 0.) for e in range(10_000) for i in range(50)]
    start = time.process_time()
    assert rec.mean() == 9999 + 24.5 and rec.mean('codes') == 9999 + 25
    assert time.process_time()-start < 0.02

def long_training(folder):
    "Memory and processor time after each of 100 epochs of 1,000 steps, with checkpoints"
    torch.set_num_threads(1)
    return fit(small_learner(1000), 100, lambda: (kilobytes(), time.process_time()), checkpoint=folder)

@needs_proc
@pytest.mark.slow
def test_a_long_training_stays_small_and_quick(tmp_path):
    memory,seconds = np.array(apart(long_training, tmp_path)).T
    assert memory[-1] < 1.1*memory[2] and memory[-1]-memory[2] < 0.5*97_000, 'more than half a kB for a step'
    pace = np.diff(seconds)
    assert np.median(pace[-10:]) < 1.5*np.median(pace[2:12]), 'epochs take longer and longer'
    assert max(p.stat().st_size for p in tmp_path.iterdir()) < 60*100_000

# Pictures --------------------------------------------------------------------------------------------------------------------

def quick(draw, seconds=10):
    "What `draw` returns, in no more than some seconds"
    start = time.process_time()
    res = draw()
    assert time.process_time()-start < seconds
    return res

def test_pictures_of_many_points(tmp_path):
    net,rng,n = tiny_supernet(k=1, widths=True),np.random.default_rng(0),50_000
    table,accuracy = CostTable(net),landscape(net.space)
    archs = list(dict.fromkeys(net.space.sample(2*n, seed=0)))[:n]
    seen = pd.DataFrame(dict(arch=archs, flops=table.flops(archs), params=table.params(archs), accuracy=[accuracy(a) for a in archs], generation=np.arange(n)//50))
    found,report = SearchResult(net.space, seen),rank_report(seen.accuracy, rng.normal(seen.accuracy, 0.01), n_boot=0)
    for plot in found.plot_pareto, found.plot_history, report.plot_scatter, report.plot_high: quick(lambda: plot().figure.canvas.draw())
    seen['arch'] = seen.arch.map(str)
    known,alone = seen[:10_000].assign(truth=rng.random(10_000)),seen[:2].assign(role=['winner', 'random'], seed=0, retrained=0.9)
    pd.concat([d.assign(stage=s) for s,d in dict(rank=known, search=seen, retrain=alone).items()]).to_csv(tmp_path/'results.csv', index=False)
    pd.DataFrame([(i//500, ('items', 'codes')[i % 2], 1., 0.1) for i in range(n)], columns=['epoch', 'phase', 'loss', 'r_c']).to_csv(tmp_path/'training.csv', index=False)
    np.save(tmp_path/'codes.npy', rng.dirichlet([5]*8, (100, 128)))
    (tmp_path/'config.json').write_text(json.dumps(dict(
        settings=dict(space='tiny', k=8, max_flops=10**6, seed=0), command='kshot_search', function='kshot_nas.tiny:tiny_supernet', space=json.loads(net.space.to_json()), flops_range=table.flops_range(),
        data=dict(name='many', train=1, valid=1, test=0, classes=['a', 'b'], shape=[1,8,8]), versions={})))
    page = quick(lambda: write_report(tmp_path), 60).read_text(encoding='utf-8')
    assert len(page) < 3e6 and 'the first 1,000 of 50,000 rows' in page
    assert page.count('data:image/png') >= 3 and page.count('<svg') == 6
