"The bench from the shell, and a build that is killed."
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from kshot_nas.study.bench import DigitsBench

env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONWARNINGS': 'ignore'}
few = DigitsBench().planned()[::70]
prog = '''
import sys
from kshot_nas.study.bench import DigitsBench
from kshot_nas.study.truth import build
bench = DigitsBench()
build(bench, sys.argv[1], archs=bench.planned()[::70], n_seeds=2, workers=2, progress=False)'''

def start(folder): return subprocess.Popen([sys.executable, '-c', prog, str(folder)], env=env, start_new_session=True)

@pytest.mark.skipif(not hasattr(signal, 'SIGKILL'), reason='this system has no SIGKILL')
def test_killed_build_goes_on(tmp_path):
    rows = tmp_path/'digits.csv'
    proc = start(tmp_path)
    while proc.poll() is None and not (rows.exists() and rows.read_text().count('\n') >= 3): time.sleep(0.02)
    os.killpg(proc.pid, signal.SIGKILL); proc.wait()                # the workers, too
    before = rows.read_text().split('\n')[:-1]
    assert 3 <= len(before) and not (tmp_path/'digits.npz').exists()
    assert start(tmp_path).wait() == 0
    after = rows.read_text().split('\n')[:-1]
    assert after[:len(before)] == before and len(after) == len({r.rsplit(',', 3)[0] for r in after}) == 2*len(few)
    bench = DigitsBench(file=tmp_path/'digits.npz')
    assert bench.archs == few and np.allclose(bench.test[3,1]*3000, bench.train_alone(few[3], 1)['test'])

def kshot_bench(*args, cwd):
    prog = 'from kshot_nas.study.command import kshot_bench; kshot_bench()'
    return subprocess.run([sys.executable, '-c', prog, *args], cwd=cwd, env=env, capture_output=True, text=True)

def test_score_from_the_shell(tmp_path):
    args = 'score', '--k', '2', '--epochs', '1', '--seeds', '1', '--workers', '1', '--archs', '20'
    res = kshot_bench(*args, cwd=tmp_path)
    assert res.returncode == 0 and 'one-shot' in res.stdout and 'simplex k=2' in res.stdout and 'one training' in res.stdout and 'synflow' in res.stdout, res.stderr
    assert len(list((tmp_path/'ablations').glob('*.json'))) == 3
    assert kshot_bench(*args, cwd=tmp_path).stdout == res.stdout      # found again, not trained again

def test_mistakes(tmp_path):
    for args,word in (('score', '--k', '0'), '--k must be at least 1'),(('score', '--code', 'best'), 'best'),((), 'build|score'):
        res = kshot_bench(*args, cwd=tmp_path)
        assert res.returncode == 2 and word in res.stderr and not list(tmp_path.iterdir())
