"Generated input: what holds for every space, architecture, code, budget and ranking, and files that are damaged anyhow."
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
from kshot_nas.app import cli
from kshot_nas.app.folder import RunFolder
from kshot_nas.app.report import Results
from kshot_nas.archive import Archive, read_archive
from kshot_nas.checkpoint import file_digest, read_checkpoint
from kshot_nas.cost import CostTable
from kshot_nas.export import load_model, save_model
from kshot_nas.learner import kshot_learner
from kshot_nas.nb201 import nb201_arch, nb201_str, read_nb201
from kshot_nas.problem import ArchProblem, landscape
from kshot_nas.rank import high_tau, kendall_tau, pearson_r, rank_report, spearman_rho
from kshot_nas.search import search
from kshot_nas.simplex import FixedCode, RandomCode, SimplexNet
from kshot_nas.space import Arch, SearchSpace
from kshot_nas.study import bench, command
from kshot_nas.tiny import tiny_supernet

pytest.importorskip('hypothesis')
from hypothesis import HealthCheck, given, settings, strategies as st  # noqa: E402

home = Path(kshot_nas.__file__).parent

def refused_or(check, f, *args, says=(), **kwargs):
    "Let `check` see what `f` returns; if `f` fails, then by an error that we raise, of a kind users expect, which says what is wrong"
    try: res = f(*args, **kwargs)
    except Exception as e:
        where = Path(traceback.extract_tb(e.__traceback__)[-1].filename)
        assert type(e) in (ValueError, TypeError, FileNotFoundError) and where.is_relative_to(home), f'{type(e).__name__} from {where}: {e}'
        assert any(w in str(e) for w in [*kwargs, *says]), f'none of {[*kwargs, *says]} in: {e}'
    else: check(res)

def generated(few, many, **what):
    "A test on `few` generated cases, and a slow one on `many`"
    def make(f, n):
        rules = settings(max_examples=n, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        return rules(given(**what)(f))
    def both(f):
        globals()[f'{f.__name__}_many'] = pytest.mark.slow(make(f, many))
        return make(f, few)
    return both

@pytest.fixture(scope='module', autouse=True)
def quiet(one_thread):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        yield

def args(**strategies): return st.fixed_dictionaries({}, optional=strategies)

names  = st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=4, unique=True).map(tuple)
ratios = st.lists(st.floats(0.01, 1), min_size=1, max_size=4, unique=True).map(lambda r: tuple(sorted(r)))
spaces = st.builds(SearchSpace, st.lists(names, min_size=1, max_size=4), st.lists(ratios, max_size=3))
seeds  = st.integers(0, 2**32)
index  = st.lists(st.integers(0, 10**6), min_size=1, max_size=4)
def arch_of(space, seed=0): return space.sample(1, seed=seed)[0]

plain = tiny_supernet(k=2, nf=2, n_layers=3)
table = CostTable(tiny_supernet(k=2, nf=2, n_layers=3, widths=True))
x     = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))

# Spaces and architectures -----------------------------------------------------------------------------------------------------

@generated(100, 1000, ops=index, widths=index | st.just([]), form=st.sampled_from([tuple, list, np.array, torch.tensor]))
def test_arch(ops, widths, form):
    a = Arch(form(ops), form(widths)) if widths else Arch(form(ops))
    assert Arch.parse(str(a)) == a == Arch(ops, widths) and hash(Arch.parse(str(a))) == hash(a)
    assert {type(i) for i in a.ops + a.widths} == {int}

@generated(100, 1000, s=st.text('0123456789-_', max_size=12) | st.text(max_size=6))
def test_parse(s):
    def check(a): assert str(a) == s
    refused_or(check, Arch.parse, s, says=[repr(s), 'Arch'])

@generated(100, 1000, space=spaces)
def test_space(space):
    again = SearchSpace.from_json(space.to_json())
    assert again == space and hash(again) == hash(space)
    assert space.size == math.prod(space.counts) > 0 and repr(space)
    space.check(arch_of(space))

@generated(50, 500, space=spaces, n=st.integers(1, 20), seed=seeds, start=st.integers(0, 10**6), how=st.sampled_from(['uniform', 'fair']))
def test_sample(space, n, seed, start, how):
    "The architecture of step t depends on nothing but the seed and t"
    archs = space.sample(n, seed=seed, how=how, start=start)
    assert len(archs) == n and all(map(space.check, archs))
    assert archs[-1:] == space.sample(1, seed=seed, how=how, start=start + n-1)

@generated(50, 500, space=spaces, seed=seeds, n=st.integers(0, 9))
def test_one_hot(space, seed, n):
    archs = space.sample(n, seed=seed)
    ops,widths = space.encode(archs)
    assert ops.sum() == n*len(space.ops) and widths.sum() == n*len(space.widths)
    assert space.decode(ops, widths) == archs == space.from_index(space.to_index(archs))

@generated(50, 500, space=spaces, seed=seeds)
def test_names_and_variation(space, seed):
    arch,other = space.sample(2, seed=seed)
    assert space.arch(**space.names(arch)) == arch
    assert torch.allclose(space.ratios([arch])[0], torch.tensor(space.names(arch)['widths']))
    assert space.check(space.mutate(arch, seed=seed)) != arch or space.size == 1
    child = space.crossover(arch, other, seed=seed)
    assert all(i in pair for i,pair in zip(child.ops + child.widths, zip(arch.ops + arch.widths, other.ops + other.widths)))

@generated(50, 500, space=spaces, other=spaces, seed=seeds)
def test_architectures_of_another_space(space, other, seed):
    stranger = arch_of(other, seed)
    def fits(o): assert [len(stranger.ops), len(stranger.widths)] == [len(space.ops), len(space.widths)] and all(i < n for i,n in zip(stranger.ops + stranger.widths, space.counts))
    for f in space.check, space.names, space.mutate: refused_or(fits, f, stranger, says=['index', 'widths', 'layer'])

# Codes and supernets ----------------------------------------------------------------------------------------------------------

def on_simplex(lam): assert (lam >= 0).all() and torch.allclose(lam.sum(-1), torch.ones_like(lam.sum(-1)), atol=1e-3)

@generated(50, 500, space=spaces, make=st.sampled_from([SimplexNet, RandomCode, FixedCode]), k=st.integers(1, 33), per_layer=st.booleans())
def test_codes(space, make, k, per_layer):
    lam = make(space, k, per_layer=per_layer)(space.sample(3, seed=0))
    assert lam.shape == (3, *[len(space.ops)]*per_layer, k)
    on_simplex(lam)

@generated(30, 400, lam=st.lists(st.floats(0, 1), min_size=2, max_size=2).filter(any).map(lambda l: [v/sum(l) for v in l]), seed=seeds)
def test_use(lam, seed):
    "The plain network computes the same"
    arch = arch_of(plain.space, seed)
    with plain.use(arch, lam): assert torch.allclose(plain.train()(x), plain.subnet(arch, lam).train()(x), atol=1e-4)

@generated(30, 300, lam=st.lists(st.floats(-1, 2) | st.just(math.nan), max_size=3))
def test_codes_that_are_none(lam):
    refused_or(lambda used: on_simplex(torch.tensor(lam)), plain.use, arch_of(plain.space), lam, says=['code'])

sizes = dict(k=st.integers(1, 33), n_in=st.integers(1, 5), n_out=st.integers(1, 20), size=st.integers(8, 20), widths=st.booleans(),
             n_layers=st.integers(1, 3), nf=st.integers(1, 5), grid=st.integers(1, 2))

@generated(30, 400, kw=args(**sizes))
def test_tiny_supernet(kw):
    net = tiny_supernet(**{'n_layers': 2, 'nf': 2, **kw})
    out = net.use(arch_of(net.space))(torch.randn(2, *net.in_shape))
    assert out.isfinite().all() and out.shape == (2, kw.get('n_out', 10)) and net.k == kw.get('k', 8)
    low,high = CostTable(net).flops_range()
    assert 0 < low <= high

# Budgets and searches ---------------------------------------------------------------------------------------------------------

flops = st.integers(*table.flops_range())

@generated(30, 400, n=st.integers(0, 3), low=st.none() | flops, high=st.none() | flops | st.floats(0, 1e9), seed=seeds)
def test_budget(n, low, high, seed):
    def check(archs):
        cost = table.flops(archs).tolist()
        assert len(cost) == n and all((low or 0) <= c <= (math.inf if high is None else high) for c in cost)
    refused_or(check, table.sample_under, n, max_flops=high, min_flops=low, seed=seed, says=['multiply-adds'])

problem = ArchProblem(plain.space, landscape(plain.space), CostTable(plain))
every   = list(plain.space)
truth   = pd.DataFrame(dict(arch=every, accuracy=map(landscape(plain.space), every), flops=CostTable(plain).flops(every)))
limit   = st.none() | st.sampled_from(truth.flops.tolist()) | st.integers(0, 10**6)
plans   = dict(pop=st.integers(1, 20), gens=st.integers(1, 4), parents=st.integers(1, 9), how=st.sampled_from(['nsga2', 'random', 'all']))

@generated(15, 300, low=limit, high=limit, seed=seeds, kw=args(**plans))
def test_search(low, high, seed, kw):
    "Nothing outside the budget is evaluated, nothing twice, and the best is the best of what was seen"
    def check(result):
        fits = truth[(truth.flops >= (0 if low is None else low)) & (truth.flops <= (math.inf if high is None else high))]
        seen = result.history
        assert set(seen.arch) <= set(fits.arch) and len(seen) == seen.arch.nunique()
        assert result.ranking.accuracy.iloc[0] == seen.accuracy.max()
        if kw.get('how') == 'all': assert result.best == fits.arch[fits.accuracy.idxmax()] and len(seen) == len(fits)
    plan = {'pop': 5, 'gens': 2, 'parents': 3, **kw}
    refused_or(check, search, problem, max_flops=high, min_flops=low, seed=seed, **plan, progress=False, says=['flops', 'FLOPs'])

# Rankings ---------------------------------------------------------------------------------------------------------------------

value = st.sampled_from([0., 1., 2.]) | st.floats(-1e6, 1e6) | st.just(math.nan)
forms = st.sampled_from([list, np.array, pd.Series, torch.tensor, lambda v: dict(enumerate(v)), lambda v: pd.Series(v, index=[Arch((i,)) for i in range(len(v))])])

@generated(100, 1500, both=st.lists(st.tuples(value, value), min_size=1, max_size=9), form=forms)
def test_ranks(both, form):
    pred,true = ([p[i] for p in both] for i in (0,1))
    a,b = form(pred),form(true)
    n,x,y = len(pred),*(np.array(list(v.values()) if isinstance(v, dict) else v, float) for v in (a, b))
    def near(want, tol=1e-9): return lambda got: None if got == pytest.approx(want(), abs=tol, nan_ok=True) else pytest.fail(f'{got} is not {want()}')
    pairs = [(i,j) for i in range(n) for j in range(i)]
    sign = {p: np.sign(x[p[0]]-x[p[1]])*np.sign(y[p[0]]-y[p[1]]) for p in pairs} if np.isfinite([x, y]).all() else {}
    both = dict(pred=a, true=b, says=['ranking'])
    refused_or(near(lambda: sum(sign.values())/len(pairs)), kendall_tau, **both)
    refused_or(near(lambda: scipy.stats.kendalltau(x, y).statistic), kendall_tau, variant='b', **both)
    refused_or(near(lambda: scipy.stats.spearmanr(x, y).statistic, 1e-7), spearman_rho, **both)
    if all(np.ptp(v) > 1e-6*abs(v).max() > 1e-9 for v in (x, y)): refused_or(near(lambda: scipy.stats.pearsonr(x, y).statistic, 1e-7), pearson_r, **both)
    if sign and len(set(y)) == n > 1:
        mixed = [s for (i,j),s in sign.items() if (y[i] == max(y)) != (y[j] == max(y))]
        refused_or(near(lambda: np.mean(mixed)), high_tau, n_high=1, **both)

@generated(50, 500, both=st.lists(st.tuples(value, value, value), min_size=1, max_size=9), n_boot=st.integers(0, 5))
def test_rank_report(both, n_boot):
    pred,true,cost = map(list, zip(*both))
    def check(report): assert repr(report) and -1 <= report.tau <= 1 and report._repr_html_()
    refused_or(check, rank_report, pred=pred, true=true, cost=cost, n_boot=n_boot, says=['ranking'])

@pytest.mark.parametrize('points,said', [(2., 'not clearly different from'), (3., 'better than'), (-2., 'not clearly different from'), (-3., 'worse than')])
def test_verdict(points, said):
    "By two standard errors, of which one is 1.34 points here: both networks make mistakes by chance on 1,000 images"
    res = object.__new__(Results)
    res.data,res.finals = dict(valid=1000),pd.DataFrame(dict(role=['finalist', 'random'], round=1))
    res.trials = pd.DataFrame(dict(role=['winner', 'random'], retrained=[0.9, 0.9-points/100]))
    assert res.difference() == pytest.approx((points, 1.3416), abs=1e-4) and said in res.verdict()
    res.trials = pd.DataFrame(dict(role=['winner', 'random']*2, retrained=[0.9, 0.88, 0.92, 0.88]))
    assert res.difference() == pytest.approx((3., 100*(2*0.91*0.09/1000 + 0.0002/2)**0.5))

# Files ------------------------------------------------------------------------------------------------------------------------

pairs = [(o,i % 3) for i,o in enumerate(torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(0)))]
dls   = DataLoaders.from_dsets(pairs[:8], pairs[8:], bs=4, num_workers=0, device='cpu', drop_last=False)
dls.c = 3

anything = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
                        lambda o: st.lists(o, max_size=3) | st.dictionaries(st.sampled_from(['ops', 'widths', 'x']), o, max_size=3), max_leaves=8)

@pytest.fixture(scope='module')
def tmp(tmp_path_factory): return tmp_path_factory.mktemp('files')

def spoiled(data):
    "Files that are random, or `data` cut short, or with some bytes changed"
    def change(at, new): return bytes(new) if at is None else data[:at] + bytes(new) + data[at + len(new):]
    return st.binary(max_size=40) | st.integers(0, len(data)).map(lambda n: data[:n]) | st.builds(change, st.integers(0, len(data)-1), st.binary(min_size=1, max_size=3))

@generated(100, 1000, s=st.text(max_size=20) | anything.map(json.dumps) | spoiled(plain.space.to_json().encode()).map(lambda b: b.decode(errors='replace')))
def test_json_of_a_space(s):
    def check(space): assert SearchSpace.from_json(space.to_json()) == space
    refused_or(check, SearchSpace.from_json, s, says=['layer', 'ops', 'widths', 'SearchSpace', 'JSON'])

def written(save):
    f = io.BytesIO()
    save(f)
    return f.getvalue()

archs  = bench.DigitsBench().planned()[::100]
good   = dict(archs=[str(a) for a in archs], valid=np.full((7, 2), 400, np.uint16), test=np.full((7, 2), 2000, np.uint16), params=np.arange(7), flops=np.arange(7))
other  = st.sampled_from([np.zeros(0), np.zeros((7, 2)), np.full((7, 2), 9999), np.array(['0-0']*7), np.arange(7)])
tables = st.dictionaries(st.sampled_from(list(good)), other, max_size=2).map(lambda d: written(lambda f: np.savez(f, **{**good, **d})))

@generated(50, 500, data=tables | spoiled(written(lambda f: np.savez(f, **good))), widths=st.booleans())
def test_bench_table(tmp, data, widths):
    (tmp/'table.npz').write_bytes(data)
    def check(b): assert len(b.truth) == len(b.archs) == len(set(b.archs)) > 0 and b.truth['mean'].between(0, 1).all()
    refused_or(check, bench.DigitsBench, file=tmp/'table.npz', widths=widths, says=['table.npz'])

rows = [f'{i},{nb201_str(nb201_arch(i))},{40+i},{50+i}.5' for i in range(3)]
text = '\n'.join(['index,arch_str,cifar10_valid,cifar10_test', *rows]).encode()

words = st.sampled_from(['index', 'arch', 'arch_str', 'cifar10_test', '0-0-0-0-0-0', 'nan', '50', *rows[0].split(',')])
lines = st.lists(st.lists(words, max_size=4).map(','.join), max_size=4).map(lambda l: '\n'.join(l).encode())

@generated(50, 700, data=spoiled(text) | lines)
def test_nb201_table(tmp, data):
    (tmp/'table.csv').write_bytes(data)
    def check(df):
        assert df.index.is_unique and all(isinstance(a, Arch) for a in df.index)
        assert df.filter(regex='_(valid|test)$').apply(lambda c: c.between(0, 100).all()).all()
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
    def held():
        with Archive(tmp/'bad.db', plain.space) as a: return a.get([arch])
    arch = arch_of(plain.space)
    for use,wants in (lambda: read_archive(tmp/'bad.db')[['arch', 'accuracy']].values.tolist(), [[[arch, 0.5]]]),(held, [{arch: (dict(accuracy=0.5), None)}, {}]):
        try: assert use() in wants[:2 if len(data[:n]) < 2 else 1]                  # SQLite takes a single byte for an empty file
        except (ValueError, OSError) as e: assert 'bad.db' in str(e), e

@generated(50, 500, o=anything, data=st.none() | spoiled(written(lambda f: torch.save(dict(model={}), f))))
def test_checkpoint(tmp, o, data):
    data = written(lambda f: torch.save(o, f)) if data is None else data
    path = tmp/('epoch_00001-' + '0'*16 + '.pt')
    path.write_bytes(data)
    path = path.rename(tmp/f'epoch_00001-{file_digest(path)}.pt')
    assert read_checkpoint(path) is None
    path.unlink()

model = plain.subnet(arch_of(plain.space), weights='fresh')

changes = st.sampled_from([dict(format='kshot_nas model 9'), dict(arch='9-9-9'), dict(arch='x'), dict(model={}), dict(model=3), dict(info=None)])

@generated(20, 300, o=anything, change=changes, data=st.none() | st.just(1) | st.binary(max_size=9))
def test_model_file(tmp, o, change, data):
    save_model(model, path := tmp/'model.pt', arch_of(plain.space))
    if data is None: torch.save({**torch.load(path, weights_only=False), **change}, path)
    elif data == 1: torch.save(o, path)
    else: path.write_bytes(data)
    def check(m): assert m(x).shape == (4, 10)
    refused_or(check, load_model, path, says=['model.pt'])

@generated(50, 500, text=st.text(max_size=30) | anything.map(json.dumps) | anything.map(lambda o: json.dumps(dict(settings=o))))
def test_config(tmp, text):
    (tmp/'run').mkdir(exist_ok=True)
    (tmp/'run/config.json').write_text(text, encoding='utf-8', errors='replace')
    def nothing(there): raise AssertionError('no such text is the config of a run')
    refused_or(nothing, RunFolder(tmp/'run').check, dict(k=3), says=['config.json', 'belongs to another run'])

# Commands -----------------------------------------------------------------------------------------------------------------------

word   = st.sampled_from(['0', '-1', '2', '1.5', 'nan', '120k', '9999999999', 'x', '', 'tiny', 'nowhere', 'a:b', 'cpu', 'ä'])
option = st.sampled_from('--data --valid-pct --size --space --max-flops --preset --k --epochs --lr --bs --pop --gens --seed --device --out'.split())
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
    done,refused = (code, err) == (0, '') and 'Nothing was written' in out,code == 2 and err.startswith('kshot_search: ')
    assert done or (refused and err.count('\n') == 1), err
    assert sorted(tmp.rglob('*')) == before

def test_kshot_bench_and_its_folder(tmp_path, capsys):
    (tmp_path/'file').write_text('mine')
    (tmp_path/'digits.csv').write_text('0-0-0-0-0,0,400\n')
    for out,name in ('file','file'),('.','digits.csv'):
        code,_,err = run(command.kshot_bench, ['build', '--out', str(tmp_path/out)], capsys)
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
    (tmp_path/'training.csv').write_text('epoch,phase,loss,r_c\n0,items,1,\n')
    (tmp_path/'results.csv').write_text('stage,arch\nrank,0-0-0\n')
    (tmp_path/'config.json').write_text(json.dumps(dict(settings={}, data={}, space=json.loads(plain.space.to_json()))))
    for name in 'finals.csv', 'best.json': (tmp_path/name).write_text('')
    (tmp_path/'models').mkdir()
    torch.save(dict(model=trap, opt=None), tmp_path/'models/trap.pth')
    numpy = [lambda f=f: list(np.load(tmp_path/f, allow_pickle=True)) for f in ('codes.npy', 'pickle.npz')]
    for load in [lambda: np.load(tmp_path/'objects.npz', allow_pickle=True)['archs'], *numpy, lambda: torch.load(tmp_path/'models/trap.pth', weights_only=False)]:
        try: load()
        except Exception: pass                                                      # the folder is there already, for one
        assert witness.exists(), 'the trap would not have worked'
        witness.rmdir()
    for name in 'objects.npz', 'pickle.npz':
        with pytest.raises(ValueError, match=name): bench.DigitsBench(file=tmp_path/name)
    with pytest.raises(ValueError, match='allow_pickle'): Results(tmp_path).recorder
    with pytest.raises(pickle.UnpicklingError): learn.load('trap')
    assert not witness.exists()
