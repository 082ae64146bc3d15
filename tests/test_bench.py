"Benches with truth: the digits bench from the shell, a build that is killed, and NAS-Bench-201 against the benchmark's own files."
import bz2
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from kshot_nas import nb201
from kshot_nas.nb201 import load_pickle, nb201_arch, nb201_cost, nb201_index, nb201_space, nb201_str, nb201_supernet, read_nb201
from kshot_nas.study.twins import canonical, has_signal
from kshot_nas.study.bench import DigitsBench, bench_archs, train_alone

# The digits bench -------------------------------------------------------------------------------------------------------------

env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONWARNINGS': 'ignore'}
few = bench_archs()[::70]
prog = '''
import sys
from kshot_nas.study.bench import bench_archs, build
build(sys.argv[1], archs=bench_archs()[::70], n_seeds=2, workers=2, progress=False)'''

def start(folder): return subprocess.Popen([sys.executable, '-c', prog, str(folder)], env=env, start_new_session=True)

@pytest.mark.skipif(not hasattr(signal, 'SIGKILL'), reason='this system has no SIGKILL')
def test_killed_build_goes_on(tmp_path):
    rows = tmp_path/'digits.csv'
    proc = start(tmp_path)
    while proc.poll() is None and not (rows.exists() and rows.read_text().count('\n') >= 3): time.sleep(0.02)
    os.killpg(proc.pid, signal.SIGKILL)                             # the workers, too
    proc.wait()
    before = rows.read_text().split('\n')[:-1]
    assert 3 <= len(before) and not (tmp_path/'digits.npz').exists()
    assert start(tmp_path).wait() == 0
    after = rows.read_text().split('\n')[:-1]
    assert after[:len(before)] == before and len(after) == len({r.rsplit(',', 2)[0] for r in after}) == 2*len(few)
    bench = DigitsBench(file=tmp_path/'digits.npz')
    assert bench.archs == few and np.allclose(bench.test[3,1]*3000, train_alone(few[3], 1)[1])

def kshot_bench(*args, cwd): return subprocess.run([Path(sys.executable).with_name('kshot_bench'), *args], cwd=cwd, env=env, capture_output=True, text=True)

def test_score_from_the_shell(tmp_path):
    args = 'score', '--k', '2', '--epochs', '1', '--seeds', '1', '--workers', '1', '--archs', '20'
    res = kshot_bench(*args, cwd=tmp_path)
    assert res.returncode == 0 and 'one-shot' in res.stdout and 'simplex k=2' in res.stdout and 'a perfect predictor' in res.stdout, res.stderr
    assert len(list((tmp_path/'ablations').glob('*.json'))) == 2
    assert kshot_bench(*args, cwd=tmp_path).stdout == res.stdout      # found again, not trained again

def test_mistakes(tmp_path):
    for args,word in (('score', '--k', '0'), '--k must be at least 1'),(('score', '--code', 'best'), 'best'),((), 'build|score'):
        res = kshot_bench(*args, cwd=tmp_path)
        assert res.returncode == 2 and word in res.stderr and not list(tmp_path.iterdir())

# NAS-Bench-201: its files are not part of the project; what needs them is skipped where they are absent -----------------------

data  = Path(__file__).resolve().parents[2]/'shared/data'
table = Path(os.environ.get('KSHOT_NB201_CSV', data/'nb201_cifar10_dev.csv'))
nats  = Path(os.environ.get('KSHOT_NATS_DIR', data/'nats_official_samples'))
needs_table = pytest.mark.skipif(not table.is_file(), reason='no table of NAS-Bench-201 here; name one in KSHOT_NB201_CSV')
needs_nats  = pytest.mark.skipif(not nats.is_dir(), reason='no files of NATS-Bench here; give the directory they are in as KSHOT_NATS_DIR')

def self_made(n=50):
    "A table in the format of the benchmark's, with made-up accuracies"
    archs = [nb201_arch(i) for i in range(0, 15625, 15625//n)]
    flops,params = nb201_cost(archs)
    names = dict(index=[nb201_index(a) for a in archs], arch_str=[nb201_str(a) for a in archs])
    return pd.DataFrame(dict(**names, cifar10_valid=50.25, cifar10_test=50.5, flops_M=(flops/1e6).round(4), params_M=(params/1e6).round(6)))

def plain_cost(net, arch):
    "Multiply-adds and parameters of the plain network of `arch`, from the shapes of what its layers put out"
    model,total = net.subnet(arch, weights='fresh').eval(),[]
    def count(m, args, out): total.append(out[0].numel()*m.weight[0].numel())
    for m in model.modules():
        if isinstance(m, (nn.Conv2d, nn.Linear)): m.register_forward_hook(count)
    with torch.no_grad(): model(torch.zeros(1, *net.in_shape))
    return sum(total),sum(p.numel() for p in model.parameters())

def check_plain(df, net):
    "Plain networks taken out of `net` cost what `df` says; the benchmark counts one more for each of the 10 biases"
    for arch,row in df.iterrows():
        flops,params = plain_cost(net, arch)
        assert (np.round((flops+10)/1e6, 4), np.round(params/1e6, 6)) == (row.flops_M, row.params_M), str(arch)

def check_table(path):
    "Names, numbers, FLOPs and parameters of the table at `path` are ours; returned as it is read"
    raw,df = pd.read_csv(path),read_nb201(path)
    assert [nb201_str(a) for a in df.index] == list(raw.arch_str)
    assert [nb201_index(a) for a in df.index] == list(raw['index'])
    flops,params = nb201_cost(list(df.index))
    np.testing.assert_array_equal((flops/1e6).round(4), df.flops_M)
    np.testing.assert_array_equal((params/1e6).round(6), df.params_M)
    np.testing.assert_array_equal(df[['cifar10_valid', 'cifar10_test']], raw[['cifar10_valid', 'cifar10_test']])
    return df

def test_self_made_table(tmp_path):
    self_made().to_csv(tmp_path/'made.csv', index=False)
    df = check_table(tmp_path/'made.csv')
    check_plain(df[::10], nb201_supernet(k=1))

@needs_table
def test_every_row_of_the_benchmark():
    df = check_table(table)
    assert len(df) > 7000
    guessing = df.index[df.cifar10_test == 10]
    assert set(guessing) == {a for a in df.index if not has_signal(a)}
    learned = df.cifar10_test[df.cifar10_test > 10]
    spread = learned.groupby([str(canonical(a)) for a in learned.index]).std().dropna()
    assert spread.median() < 0.3, 'architectures of one function reach different accuracies'

@needs_table
def test_plain_networks_cost_what_the_benchmark_says():
    df = read_nb201(table)
    check_plain(df.sample(200, random_state=0), nb201_supernet(k=1))

@needs_nats
def test_official_files():
    df = read_nb201(nats/'NATS-tss-v1_0-3ffb9-simple')
    assert list(df.index) == [nb201_arch(i) for i in (0, 11, 284)] and df.notna().all().all()
    np.testing.assert_allclose(df.flops_M*1e6, nb201_cost(list(df.index))[0])
    np.testing.assert_allclose(df.params_M*1e6, nb201_cost(list(df.index))[1])
    meta = load_pickle(nats/'NATS-tss-v1_0-3ffb9-simple/meta.pickle.pbz2')
    assert meta['meta_archs'] == [nb201_str(nb201_arch(i)) for i in range(nb201_space.size)]

@needs_nats
@needs_table
def test_official_files_and_table_agree():
    files,df = read_nb201(nats/'NATS-tss-v1_0-3ffb9-simple'),read_nb201(table)
    both = [a for a in files.index if a in df.index]
    assert both
    np.testing.assert_allclose(files.loc[both, list(df)], df.loc[both], atol=6e-5)

@needs_nats
def test_the_size_search_space_is_refused():
    with pytest.raises(ValueError, match='no file of the topology search space'): read_nb201(nats/'NATS-sss-v1_0-50262-simple')

def test_an_untrusted_pickle_never_runs(tmp_path):
    "By every protocol, and with calls that hide inside what is allowed."
    made = tmp_path/'made'
    class Trap:
        def __reduce__(self): return os.mkdir,(str(made),)
    text = str(made).encode()
    payloads = [pickle.dumps(Trap(), protocol=p) for p in range(pickle.HIGHEST_PROTOCOL+1)]
    payloads += [b'(S\'' + text + b'\'\nios\nmkdir\n.',                                               # INST
                 b'cbuiltins\ngetattr\n(cos\nmkdir\ntR.',
                 b'ccollections\nOrderedDict.fromkeys\n.', b'\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.__init__\x93.',   # dotted names
                 b'cnumpy.core.multiarray\nscalar\n(cnumpy\ndtype\n(S\'O8\'\ntRS\'12345678\'\ntR.']  # an object out of raw bytes
    for i,payload in enumerate(payloads):
        path = tmp_path/'000000.pickle.pbz2'
        path.write_bytes(bz2.compress(payload))
        with pytest.raises(ValueError, match='cannot read 000000.pickle.pbz2'): read_nb201(tmp_path)
        assert not made.exists(), f'payload {i}'
    pickle.loads(payloads[0])
    assert made.exists(), 'the trap would not have worked'
