"Whatever is put in works, or is refused by us, in words that name it: generated arguments and files for all public names."
import bz2
import io
import json
import math
import os
import pickle
import traceback
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from fastai.data.core import DataLoaders
from fastai.losses import CrossEntropyLossFlat

import kshot_nas
from kshot_nas import bench, cli
from kshot_nas.archive import Archive, read_archive
from kshot_nas.cost import CostTable
from kshot_nas.learner import kshot_learner
from kshot_nas.nb201 import nb201_arch, nb201_str, read_nb201
from kshot_nas.problem import ArchProblem, landscape
from kshot_nas.rank import high_tau, kendall_tau, pearson_r, rank_report, spearman_rho
from kshot_nas.app.report import Results
from kshot_nas.checkpoint import file_digest, read_checkpoint
from kshot_nas.retrain import retrain_learner
from kshot_nas.search import search
from kshot_nas.export import export_onnx, load_model, save_model
from kshot_nas.simplex import FixedCode, RandomCode, SimplexNet
from kshot_nas.space import Arch, SearchSpace
from kshot_nas.tiny import tiny_supernet

pytest.importorskip('hypothesis')
from hypothesis import HealthCheck, given, settings, strategies as st  # noqa: E402

home = Path(kshot_nas.__file__).parent

def refused_or(check, f, *args, says=(), **kwargs):
    "Let `check` see what `f` returns; if `f` fails instead, then by an error that we raise, of a kind users expect, which names an argument or what was given"
    try: res = f(*args, **kwargs)
    except Exception as e:
        where = traceback.extract_tb(e.__traceback__)[-1]
        assert type(e) in (ValueError, TypeError, FileNotFoundError) and Path(where.filename).parent == home, f'{type(e).__name__} from {where.filename}: {e}'
        words = [*kwargs, *says, *(repr(a)[:20] for a in args)]
        assert any(w in str(e) for w in words), f'none of {words} in: {e}'
    else: check(res)

def generated(few, many, **what):
    "A test on `few` generated cases, and a slow one on `many`"
    def make(f, n): return settings(max_examples=n, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))(given(**what)(f))
    def both(f):
        globals()[f'{f.__name__}_many'] = pytest.mark.slow(make(f, many))
        return make(f, few)
    return both

@pytest.fixture(scope='module', autouse=True)
def quiet(one_thread):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        yield

# What may come: wrong things, and right ones -----------------------------------------------------------------------------------

number = st.integers(-3, 20) | st.integers() | st.floats() | st.sampled_from([np.int64(2), np.float32(0.5), 10**400, True, False])
odd    = st.none() | number | st.text(max_size=4) | st.binary(max_size=2) | st.lists(st.integers(-1, 3), max_size=3) | st.dictionaries(st.text(max_size=1), st.integers(), max_size=1) | st.builds(object)
small  = st.integers(0, 5)
def some(*good): return st.sampled_from(good) | odd
def args(**strategies): return st.fixed_dictionaries({}, optional=strategies)
def vast(kw, *names): return any(isinstance(kw.get(n), (int, np.integer)) and kw[n] > 50 for n in names)    # who asks for a million items gets them, memory permitting

names  = st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=4, unique=True).map(tuple)
ratios = st.lists(st.floats(0, 1, exclude_min=True, allow_subnormal=False), min_size=1, max_size=4, unique=True).map(lambda r: tuple(sorted(r)))
spaces = st.builds(SearchSpace, st.lists(names, min_size=1, max_size=4), st.lists(ratios, max_size=3))
seeds  = st.integers(0, 2**32)
def arch_of(space, seed=0): return space.sample(1, seed=seed)[0]

net    = tiny_supernet(k=2, nf=2, n_layers=3, widths=True)
plain  = tiny_supernet(k=2, nf=2, n_layers=3)
table  = CostTable(net)
x      = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))

# Spaces and architectures -------------------------------------------------------------------------------------------------------

indices = st.lists(small | odd, max_size=4) | odd | st.lists(small, max_size=4).map(np.array) | st.lists(small, max_size=4).map(torch.tensor)

@generated(100, 1000, ops=indices, widths=indices)
def test_arch(ops, widths):
    def check(a): assert Arch.parse(str(a)) == a == Arch(list(a.ops), np.array(a.widths, int)) and hash(Arch.parse(str(a))) == hash(a) and {type(i) for i in a.ops + a.widths} == {int}
    refused_or(check, Arch, ops=ops, widths=widths, says=['Arch'])

@generated(100, 1000, s=st.text('0123456789-_', max_size=12) | st.text(max_size=6) | st.from_regex('[0-9]{1,3}(-[0-9]{1,25}){0,3}(_[0-9])?', fullmatch=True) | odd)
def test_parse(s):
    def check(a): assert str(a) == s
    refused_or(check, Arch.parse, s)

def check_space(space):
    assert SearchSpace.from_json(space.to_json()) == space and hash(SearchSpace.from_json(space.to_json())) == hash(space)
    assert space.size == math.prod(space.counts) > 0 and repr(space)
    space.check(arch_of(space))

layers = st.lists(names | st.lists(st.text(max_size=1) | odd, max_size=3) | odd, max_size=3)
cuts   = st.lists(ratios | st.lists(st.floats() | odd, max_size=3) | odd, max_size=3)

@generated(100, 1000, ops=layers | odd, widths=cuts | odd)
def test_space(ops, widths): refused_or(check_space, SearchSpace, ops=ops, widths=widths, says=['layer', 'SearchSpace'])

anything = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3), lambda o: st.lists(o, max_size=3) | st.dictionaries(st.sampled_from(['ops', 'widths', 'x']), o, max_size=3), max_leaves=8)

@generated(100, 1000, s=st.text(max_size=20) | st.binary(max_size=9) | anything.map(json.dumps) | st.builds(lambda o,w: json.dumps(dict(ops=o, widths=w)), st.lists(names), st.lists(ratios)) | odd)
def test_json(s): refused_or(check_space, SearchSpace.from_json, s, says=['layer', 'ops', 'widths', 'SearchSpace'])

@generated(50, 500, space=spaces, n=st.integers(0, 20), kw=args(seed=seeds | odd, how=some('uniform', 'fair', 'balanced'), start=st.integers(0, 10**6) | odd, cost=st.lists(st.lists(st.floats(0, 9) | odd, max_size=4), max_size=4) | odd), own=st.booleans())
def test_sample(space, n, kw, own):
    if own and kw.get('how') == 'balanced': kw['cost'] = [range(c) for c in space.counts]
    def check(archs):
        assert len(archs) == n and all(map(space.check, archs))
        if kw.get('seed') is not None and n: assert archs[-1:] == space.sample(1, **{**kw, 'start': kw.get('start', 0) + n-1})
    refused_or(check, space.sample, n=n, **kw)

@generated(50, 500, space=spaces, seed=seeds, n=st.integers(0, 9))
def test_one_hot(space, seed, n):
    archs = space.sample(n, seed=seed)
    ops,widths = space.encode(archs)
    assert ops.sum() == n*len(space.ops) and widths.sum() == n*len(space.widths) and space.decode(ops, widths) == archs == space.from_index(space.to_index(archs))

arrays = st.builds(lambda shape,dtype,fill: torch.full(shape, fill).to(dtype), st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from([torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64]), st.sampled_from([0., 1., -1., 0.5, 7., float('nan')]))
arrays = arrays | arrays.map(lambda t: t.numpy()) | st.sampled_from([np.array([['a']]), np.array([[None]]), np.array([[2**63]], np.uint64), np.zeros((1, 2), 'M8[s]')]) | odd

@generated(50, 500, space=spaces, a=arrays, b=arrays)
def test_foreign_arrays(space, a, b):
    def check(archs): assert all(map(space.check, archs))
    refused_or(check, space.decode, a, b, says=['one-hot', 'shapes', 'encode'])
    refused_or(check, space.from_index, a, says=['index', 'archs', 'expected an Arch'])
    refused_or(lambda cost: None, table.flops, a, says=['index', 'archs', 'expected an Arch'])

@generated(50, 500, space=spaces, other=spaces, seed=seeds, a=indices, kw=args(p=st.floats(0, 1) | odd, seed=seeds | odd))
def test_names_and_variation(space, other, seed, a, kw):
    arch,stranger = arch_of(space, seed),arch_of(other, seed)
    assert space.arch(**space.names(arch)) == arch and torch.allclose(space.ratios([arch])[0], torch.tensor(space.names(arch)['widths']))
    def check(new): assert space.check(new) != arch or space.size == 1
    refused_or(check, space.mutate, arch, **kw)
    def check(child): assert all(i in pair for i,pair in zip(child.ops + child.widths, zip(arch.ops + arch.widths, stranger.ops + stranger.widths)))
    refused_or(check, space.crossover, arch, stranger, says=['index', 'widths'])
    for f in space.check, space.names: refused_or(lambda o: None, f, stranger, says=['index', 'widths'])
    refused_or(space.check, space.arch, ops=a, says=['there is no', 'widths'])

# Codes and supernets ------------------------------------------------------------------------------------------------------------

def on_simplex(lam): assert lam.isfinite().all() and (lam >= 0).all() and torch.allclose(lam.sum(-1), torch.ones_like(lam.sum(-1)), atol=1e-3)

@generated(50, 500, space=spaces, make=st.sampled_from([SimplexNet, RandomCode, FixedCode]), k=st.integers(1, 33) | odd, kw=args(seed=seeds | odd, per_layer=st.booleans(), std=st.floats(0, 1e6) | odd, hidden=st.integers(1, 9) | odd), archs=odd)
def test_codes(space, make, k, kw, archs):
    if vast({'k': k, **kw}, 'k', 'hidden'): return
    if make is not SimplexNet: kw = {n:v for n,v in kw.items() if n in ('per_layer', 'seed')[:1 + (make is RandomCode)]}
    def check(coder):
        lam = coder(space.sample(3, seed=0))
        assert lam.shape == (3, *([len(space.ops)] if kw.get('per_layer') else []), k)
        on_simplex(lam)
        refused_or(on_simplex, coder, archs, says=['Arch', 'archs', 'empty'])
    refused_or(check, make, space=space, k=k, **kw)

codes = st.lists(st.floats(0, 1), min_size=2, max_size=2).map(lambda l: [v/(sum(l) or 1) for v in l]) | st.lists(st.floats() | odd, max_size=3) | arrays

@generated(30, 400, lam=codes, a=indices, seed=seeds)
def test_use(lam, a, seed):
    arch = arch_of(plain.space, seed)
    def check(used):
        on_simplex(used.code.lam)
        assert torch.allclose(used.train()(x), plain.subnet(arch, lam).train()(x), atol=1e-4)                       # the plain network computes the same
    before = plain.arch,plain.code.lam
    refused_or(check, plain.use, arch, lam, says=['code', repr(lam)[:20]])
    plain.switch(*before)
    refused_or(lambda o: None, plain.use, a, says=['expected an Arch'])
    assert (plain.arch, plain.code.lam) == before

@generated(50, 500, shape=st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(4, 12), st.integers(4, 12)) | st.lists(st.integers(0, 9), max_size=5), dtype=st.sampled_from([torch.float32, torch.int64, torch.bool, torch.complex64]))
def test_forward(shape, dtype):
    def check(out): assert out.shape == (shape[0], 10) and out.isfinite().all()
    refused_or(check, plain, torch.zeros(tuple(shape), dtype=dtype), says=['batches of float inputs of shape (1, 8, 8)', 'single value per channel'])

@generated(30, 400, kw=args(k=st.integers(1, 33) | odd, n_in=st.integers(1, 5) | odd, n_out=st.integers(1, 20) | odd, size=st.integers(8, 20) | odd, widths=st.booleans(), n_layers=st.integers(1, 3) | odd, nf=st.integers(1, 5) | odd, grid=st.integers(1, 3) | odd, noise=st.floats(0, 2) | odd, skip=odd))
def test_tiny_supernet(kw):
    def check(net):
        out = net.use(arch_of(net.space))(torch.randn(2, *net.in_shape))
        assert out.isfinite().all() and out.shape == (2, kw.get('n_out', 10)) and net.k == kw.get('k', 8)
        low,high = CostTable(net).flops_range()
        assert 0 < low <= high
    if vast(kw, 'k', 'n_in', 'n_out', 'size', 'n_layers', 'nf', 'grid'): return
    refused_or(check, tiny_supernet, **{'n_layers': 2, 'nf': 2, **kw})

# Budgets and searches -----------------------------------------------------------------------------------------------------------

flops   = st.integers(*table.flops_range())
budgets = flops | flops.map(lambda f: f + 0.5) | odd

@generated(30, 400, n=st.integers(0, 3) | odd, kw=args(max_flops=budgets, min_flops=st.none() | flops.map(lambda f: f//2) | odd, seed=seeds | odd))
def test_budget(n, kw):
    if vast(dict(n=n), 'n'): return
    def check(archs):
        cost = table.flops(archs).tolist()
        assert len(cost) == n and all((kw.get('min_flops') or 0) <= c <= (math.inf if kw.get('max_flops') is None else kw['max_flops']) for c in cost)
    refused_or(check, table.sample_under, n, **kw, says=['multiply-adds', 'n is'])

problem = ArchProblem(plain.space, landscape(plain.space), CostTable(plain))
truth   = pd.DataFrame([dict(arch=a, accuracy=landscape(plain.space)(a), flops=f) for a,f in zip(plain.space, CostTable(plain).flops(list(plain.space)).tolist())])
limit   = st.sampled_from(truth.flops.tolist()) | odd

@generated(15, 300, kw=args(pop=st.integers(1, 20) | odd, gens=st.integers(1, 4) | odd, parents=st.integers(1, 9) | odd, seed=seeds | odd, workers=some(1), how=some('nsga2', 'random', 'all'), max_flops=limit, min_flops=st.none() | limit))
def test_search(kw):
    if vast(kw, 'pop', 'gens', 'parents') or kw.get('workers', 1) not in (1, None, '', 0): return
    low,high = (kw.get('min_flops'),kw.get('max_flops'))
    def check(found):
        fits = truth[(truth.flops >= (-math.inf if low is None else low)) & (truth.flops <= (math.inf if high is None else high))]
        assert set(found.history.arch) <= set(fits.arch) and len(found.history) == found.history.arch.nunique()
        assert found.ranking.accuracy.iloc[0] == found.history.accuracy.max()
        if kw.get('how') == 'all': assert found.best == fits.arch[fits.accuracy.idxmax()] and len(found.history) == len(fits)
    refused_or(check, search, problem, **{'pop': 5, 'gens': 2, 'parents': 3, **kw}, progress=False, says=['flops', 'FLOPs'])

# Rankings -----------------------------------------------------------------------------------------------------------------------

values = st.lists(st.sampled_from([0., 1., 1., 2., 3., -5.]) | st.floats(-1e9, 1e9) | st.floats(), max_size=9)
forms  = st.sampled_from([list, np.array, pd.Series, torch.tensor, lambda v: np.array(v, np.float32), lambda v: dict(enumerate(v)), lambda v: pd.Series(v, index=[Arch((i,)) for i in range(len(v))]), lambda v: pd.Series(v, index=[0]*len(v))])

@generated(100, 1500, both=st.lists(st.tuples(*[st.sampled_from([0., 1., 2.]) | st.floats(-1e6, 1e6) | st.floats()]*2), max_size=9), form=forms)
def test_ranks(both, form):
    pred,true = ([p[i] for p in both] for i in (0,1))
    a,b = form(pred),form(true)
    n,x,y = len(pred),*(np.array(list(v.values()) if isinstance(v, dict) else v, float) for v in (a, b))
    def near(got, want, tol=1e-9): assert got == pytest.approx(want, abs=tol, nan_ok=True)
    pairs = [(i,j) for i in range(n) for j in range(i)]
    sign = {p: np.sign(x[p[0]]-x[p[1]])*np.sign(y[p[0]]-y[p[1]]) for p in pairs} if np.isfinite([x, y]).all() else {}
    refused_or(lambda t: near(t, sum(sign.values())/len(pairs)), kendall_tau, pred=a, true=b, says=['ranking'])
    refused_or(lambda t: near(t, scipy.stats.kendalltau(x, y).statistic), kendall_tau, pred=a, true=b, variant='b', says=['ranking'])
    refused_or(lambda t: near(t, scipy.stats.spearmanr(x, y).statistic, 1e-7), spearman_rho, pred=a, true=b, says=['ranking'])
    def moderate(v): return np.ptp(v) > 1e-6*abs(v).max() and abs(v).max() < 1e100 and abs(v).max() > 1e-100
    def pearson(r): near(r, scipy.stats.pearsonr(x, y).statistic, 1e-7) if moderate(x) and moderate(y) else None; assert math.isnan(r) or -1 <= r <= 1
    refused_or(pearson, pearson_r, pred=a, true=b, says=['ranking'])
    if len(set(y)) == n > 1: refused_or(lambda t: near(t, np.mean([s for (i,j),s in sign.items() if (y[i] == max(y)) != (y[j] == max(y))])), high_tau, pred=a, true=b, n_high=1)

@generated(50, 500, pred=values | odd, true=values | odd, kw=args(cost=values | odd, seeds=st.lists(values, max_size=4) | odd, n_high=odd, n_boot=st.integers(0, 5) | odd, seed=odd))
def test_rank_report(pred, true, kw):
    if vast(kw, 'n_boot'): return
    def check(report): assert repr(report) and -1 <= report.tau <= 1 and report._repr_html_()
    refused_or(check, rank_report, pred=pred, true=true, **{'n_boot': 3, **kw}, says=['ranking'])
    refused_or(lambda t: None, high_tau, [1,2,3], [3,1,2], n_high=kw.get('n_high'))

# Learners -----------------------------------------------------------------------------------------------------------------------

pairs = [(o,i % 3) for i,o in enumerate(torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(0)))]
dls   = DataLoaders.from_dsets(pairs[:8], pairs[8:], bs=4, num_workers=0, device='cpu', drop_last=False)
dls.c = 3

@generated(20, 300, kw=args(k=st.integers(1, 9) | odd, n_paths=small | odd, temp=st.floats(0.1, 1) | odd, alpha=st.floats(0, 2) | odd, warmup=small | odd, code=some('simplex', 'fixed', 'random'), seed=seeds | odd, n_out=st.integers(1, 9) | odd, n_in=some(1, None),
                            ratio=st.tuples(small, small) | odd, how=some('uniform', 'fair'), n_valid=small | odd, max_dist=st.floats(0.1, 1) | odd, preset=some('paper'), net=some(tiny_supernet, plain)), arch=odd)
def test_kshot_learner(kw, arch):
    if vast(kw, 'k', 'n_out', 'n_in'): return
    supernet,extra = kw.pop('net', tiny_supernet),dict(nf=2, n_layers=3)
    def check(learn):
        lam = learn.code(arch_of(learn.space))
        assert lam.shape == (learn.net.k,)
        on_simplex(lam)
        for f in learn.code, learn.eval_arch, learn.subnet: refused_or(lambda o: None, f, arch, says=['expected an Arch'])
        refused_or(lambda df: len(df) == 0, learn.eval_archs, arch, says=['archs', 'expected an Arch'])
    refused_or(check, kshot_learner, dls, supernet, loss_func=CrossEntropyLossFlat(), **kw, **extra if supernet is tiny_supernet else {})

@generated(5, 100, kw=args(n_epoch=st.just(1) | odd, lr=st.floats(0, 0.1) | odd, codes_scale=st.floats(0, 0.1) | odd, wd=st.floats(0, 0.1) | odd, keep=odd))
def test_fit(kw):
    if vast(kw, 'n_epoch') or any(isinstance(kw.get(n), (int, float, np.float32)) and kw[n] > 1 for n in ('lr', 'codes_scale', 'wd')): return
    learn = kshot_learner(dls, plain, warmup=0, n_paths=2, loss_func=CrossEntropyLossFlat())
    def check(_): assert all(p.isfinite().all() for p in learn.model.parameters())
    with learn.no_bar(), learn.no_logging(): refused_or(check, learn.fit_kshot, **{'n_epoch': 1, 'lr': 0.01, **kw})

@generated(15, 200, model=some('good'), kw=args(weights=some('fresh', 'inherit'), wd=st.floats(0, 1) | odd, ema=st.floats(0, 0.99) | odd, smoothing=st.floats(0, 1) | odd, dropout=st.floats(0, 0.9) | odd, rand_augment=st.tuples(small, small) | odd, erase=st.floats(0, 1) | odd, seed=seeds | odd))
def test_retrain_learner(model, kw):
    if model == 'good': model = plain.subnet(arch_of(plain.space), weights='fresh')
    def check(learn): assert learn.model.in_shape == (1, 8, 8)
    refused_or(check, retrain_learner, dls, model=model, **kw)

# Files --------------------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def tmp(tmp_path_factory): return tmp_path_factory.mktemp('files')

def spoiled(data):
    "Files that are random, or `data` cut short, or with some bytes changed"
    def change(at, new): return bytes(new) if at is None else data[:at] + bytes(new) + data[at + len(new):]
    return st.binary(max_size=40) | st.integers(0, len(data)).map(lambda n: data[:n]) | st.builds(change, st.integers(0, len(data)-1), st.binary(min_size=1, max_size=3))

def written(save):
    f = io.BytesIO()
    save(f)
    return f.getvalue()

archs  = bench.DigitsBench().planned()[::100]
good   = dict(archs=[str(a) for a in archs], valid=np.full((7, 2), 400, np.uint16), test=np.full((7, 2), 2000, np.uint16), params=np.arange(7), flops=np.arange(7))
tables = st.dictionaries(st.sampled_from(list(good)), st.sampled_from([np.zeros(0), np.zeros((7, 2)), np.full((7, 2), 9999), np.array(['0-0']*7), np.array(7.), np.full((7, 2), np.nan), np.arange(7), np.array([None]*7, object)]), max_size=2)
tables = tables.map(lambda d: written(lambda f: np.savez(f, **{**good, **d}))) | st.sampled_from(list(good)).map(lambda n: written(lambda f: np.savez(f, **{k:v for k,v in good.items() if k != n})))

@generated(50, 500, data=tables | spoiled(written(lambda f: np.savez(f, **good))) | st.just(written(lambda f: np.save(f, np.arange(3)))), widths=st.booleans())
def test_bench_table(tmp, data, widths):
    (tmp/'table.npz').write_bytes(data)
    def check(b): assert len(b.truth) == len(b.archs) == len(set(b.archs)) > 0 and b.truth['mean'].between(0, 1).all() and repr(b)
    refused_or(check, bench.DigitsBench, file=tmp/'table.npz', widths=widths, says=['table.npz'])

rows = [f'{i},{nb201_str(nb201_arch(i))},{40+i},{50+i}.5' for i in range(3)]
text = '\n'.join(['index,arch_str,cifar10_valid,cifar10_test', *rows]).encode()

@generated(50, 700, data=spoiled(text) | st.text(max_size=60).map(str.encode) | st.lists(st.lists(st.sampled_from(['index', 'arch', 'arch_str', 'cifar10_test', '0-0-0-0-0-0', 'nan', '50', *rows[0].split(',')]), max_size=4).map(','.join), max_size=4).map(lambda l: '\n'.join(l).encode()))
def test_nb201_table(tmp, data):
    (tmp/'table.csv').write_bytes(data)
    def check(df): assert df.index.is_unique and all(isinstance(a, Arch) for a in df.index) and df.filter(regex='_(valid|test)$').apply(lambda c: c.between(0, 100).all()).all()
    refused_or(check, read_nb201, tmp/'table.csv', says=['table.csv', 'a name has the form', 'layer', 'cannot read', 'there is no'])

@generated(30, 300, o=anything, data=st.none() | spoiled(pickle.dumps({'200': dict(all_results={}, arch_str='x')})))
def test_nats_files(tmp, o, data):
    (tmp/'nats').mkdir(exist_ok=True)
    (tmp/'nats/000000.pickle.pbz2').write_bytes(bz2.compress(pickle.dumps(o) if data is None else data))
    refused_or(None, read_nb201, tmp/'nats', says=['000000.pickle.pbz2'])

@pytest.fixture(scope='module')
def archive(tmp):
    with Archive(tmp/'good.db', plain.space) as a: a.put(arch_of(plain.space), dict(accuracy=0.5))
    return (tmp/'good.db').read_bytes()

@generated(20, 300, at=st.none() | st.integers(0, 10**4), new=st.binary(min_size=1, max_size=9), n=st.none() | st.integers(0, 20000))
def test_archive(tmp, archive, at, new, n):
    data = new if at is None else archive[:at] + new + archive[at + len(new):]
    for f in tmp.glob('bad.db*'): f.unlink()
    (tmp/'bad.db').write_bytes(data[:n])
    for use in (lambda: read_archive(tmp/'bad.db')), (lambda: Archive(tmp/'bad.db', plain.space).close()):
        try: use()
        except (ValueError, OSError) as e: assert 'bad.db' in str(e), e

@generated(50, 500, o=anything, data=st.none() | spoiled(written(lambda f: torch.save(dict(model={}), f))))
def test_checkpoint(tmp, o, data):
    data = written(lambda f: torch.save(o, f)) if data is None else data
    path = tmp/f'epoch_00001-{bench.joblib.hash(0)[:16]}.pt'
    path.write_bytes(data)
    path = path.rename(tmp/f'epoch_00001-{file_digest(path)}.pt')
    assert read_checkpoint(path) is None
    path.unlink()

model = plain.subnet(arch_of(plain.space), weights='fresh')

@generated(20, 300, o=anything, kw=args(format=some('kshot_nas model 1'), arch=some('0-0-0', '9-9-9'), build=some(dict(nf=2, n_layers=3), dict(nf=3), dict(x=1)), weights=some({}, dict(x=torch.zeros(1)))), data=st.none() | st.just(1) | st.binary(max_size=9))
def test_model_file(tmp, o, kw, data):
    save_model(model, path := tmp/'model.pt', arch_of(plain.space), dict(nf=2, n_layers=3))
    if data is None: torch.save({**torch.load(path, weights_only=True), **{k:v for k,v in kw.items() if isinstance(v, (int, float, str, list, dict))}}, path)
    elif data == 1: torch.save(o, path)
    else: path.write_bytes(data)
    def check(m): assert m(x).shape == (4, 10)
    refused_or(check, load_model, path, tiny_supernet, says=['model.pt'])

@generated(50, 500, text=st.text(max_size=30) | anything.map(json.dumps) | anything.map(lambda o: json.dumps(dict(settings=o))))
def test_config(tmp, text):
    (tmp/'run').mkdir(exist_ok=True)
    (tmp/'run/config.json').write_text(text, encoding='utf-8', errors='replace')
    refused_or(lambda there: None, cli.check_folder, tmp/'run', dict(k=3), says=['config.json', 'belongs to another run'])

@generated(10, 100, target=some(model), name=st.sampled_from(['a.onnx', 'nowhere/a.onnx']), images=st.sampled_from([None, 'x', torch.zeros(2, 3, 8, 8), torch.zeros(8, 8), torch.zeros(0, 1, 8, 8).long(), 3]))
def test_export_onnx(tmp, target, name, images):
    for m in ('onnx', 'onnxscript', 'onnxruntime'): pytest.importorskip(m)
    refused_or(None, export_onnx, model=target, path=tmp/name, x=images, says=['nowhere', 'size of the images'])

# Commands -----------------------------------------------------------------------------------------------------------------------

word   = st.sampled_from(['0', '-1', '2', '1.5', 'nan', 'inf', '1e400', '120k', '9999999999999999999', 'x', '', 'tiny', 'nowhere', 'a:b', ':', 'os:getcwd', 'cpu', '\0', 'ä'])
option = st.sampled_from('--data --valid-pct --size --space --max-flops --preset --k --epochs --lr --bs --pop --gens --retrain-epochs --trials --seed --device --workers --out'.split())
argv   = st.lists(st.tuples(option, word), max_size=3).map(lambda l: [w for pair in l for w in pair])

def run(main, argv, capsys):
    try: code = main(argv)
    except SystemExit as e: code = e.code
    return code,*capsys.readouterr()

@generated(8, 60, argv=argv)
def test_kshot_search(tmp, capsys, monkeypatch, argv):
    monkeypatch.chdir(tmp)
    before = sorted(tmp.rglob('*'))
    code,out,err = run(cli.main, [*argv, '--dry-run'], capsys)
    assert (code, err) == (0, '') and 'Nothing was written' in out or code == 2 and err.startswith('kshot_search: ') and err.count('\n') == 1, err
    assert sorted(tmp.rglob('*')) == before

@generated(20, 300, argv=st.lists(st.sampled_from('build score --seeds --k --code --epochs --archs --widths --workers --out'.split()) | word, max_size=6))
def test_kshot_bench(capsys, monkeypatch, argv):
    monkeypatch.setattr(bench, '_job', lambda args: None)
    code,out,err = run(bench.kshot_bench, argv, capsys)
    assert code in (None, 0) and not err or code == 2 and 'kshot_bench' in err, err

def test_kshot_bench_and_its_folder(tmp_path, capsys):
    (tmp_path/'file').write_text('mine')
    (tmp_path/'digits.csv').write_text('0-0-0-0-0,0,400\n')
    for out,name in ('file','file'),('.','digits.csv'):
        code,_,err = run(bench.kshot_bench, ['build', '--out', str(tmp_path/out)], capsys)
        assert code == 2 and name in err and 'Traceback' not in err
    assert (tmp_path/'digits.csv').read_text() == '0-0-0-0-0,0,400\n'

# Files that would do harm -------------------------------------------------------------------------------------------------------

class Payload:
    "Makes the folder `witness` when it is unpickled"
    def __init__(self, witness): self.witness = witness
    def __reduce__(self): return os.mkdir,(str(self.witness),)

def test_no_file_runs_code(tmp_path):
    witness,learn = tmp_path/'witness',kshot_learner(dls, plain, loss_func=CrossEntropyLossFlat(), path=tmp_path)
    trap,column = Payload(witness),np.array([Payload(witness)]*7, object)
    np.savez(tmp_path/'objects.npz', **{**good, 'archs': column})
    np.save(tmp_path/'codes.npy', column)
    (tmp_path/'pickle.npz').write_bytes(pickle.dumps(trap))
    (tmp_path/'training.csv').write_text('epoch,phase,loss,r_c\n0,items,1,\n'); (tmp_path/'results.csv').write_text('stage,arch\nrank,0-0-0\n')
    (tmp_path/'config.json').write_text(json.dumps(dict(settings={}, data={}, space=json.loads(plain.space.to_json()))))
    (tmp_path/'models').mkdir()
    torch.save(dict(model=trap, opt=None), tmp_path/'models/trap.pth')
    for load in ((lambda: np.load(tmp_path/'objects.npz', allow_pickle=True)['archs']), (lambda: np.load(tmp_path/'codes.npy', allow_pickle=True)), (lambda: np.load(tmp_path/'pickle.npz', allow_pickle=True)), (lambda: torch.load(tmp_path/'models/trap.pth', weights_only=False))):
        try: load()
        except Exception: pass                                                      # the folder is there already, for one
        assert witness.exists(), 'the trap would not have worked'
        witness.rmdir()
    for name in 'objects.npz', 'pickle.npz':
        with pytest.raises(ValueError, match=name): bench.DigitsBench(file=tmp_path/name)
    with pytest.raises(ValueError, match='allow_pickle'): Results(tmp_path).recorder
    with pytest.raises(pickle.UnpicklingError): learn.load('trap')
    assert not witness.exists()
