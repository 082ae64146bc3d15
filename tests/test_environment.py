"Other Pythons, no home, a locale that knows only ASCII, `accelerate launch`; and how long an import takes."
import ast
import os
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

root  = Path(__file__).resolve().parents[1]
files = [p for d in ('kshot_nas', 'tools', 'tests', 'benchmarks') for p in sorted((root/d).glob('*.py'))]

def run(*args, cwd, **env):
    "What a command prints; variables whose value is None are taken away from it"
    env = {k:v for k,v in {**os.environ, 'OMP_NUM_THREADS': '1', **env}.items() if v is not None}
    res = subprocess.run([str(a) for a in args], cwd=cwd, capture_output=True, env=env, timeout=600)
    assert res.returncode == 0, res.stderr.decode(errors='replace')
    return res.stdout.decode(encoding='utf-8')

def test_nothing_newer_than_the_oldest_python():
    ini = ConfigParser(delimiters=['='])
    ini.read(root/'settings.ini', encoding='utf-8')
    oldest = tuple(map(int, ini['DEFAULT']['min_python'].split('.')))
    for p in files: ast.parse(p.read_text(encoding='utf-8'), p.name, feature_version=oldest)

@pytest.mark.parametrize('version', ['3.10', '3.11', '3.12', '3.13', '3.14'])
def test_every_file_compiles(version, tmp_path):
    "With the Python of that version, if there is one: without warnings, and with what its parser knows."
    found = [*map(Path, filter(None, [shutil.which(f'python{version}')])), *Path.home().glob(f'.pyenv/versions/{version}.*/bin/python')]
    exe = next((e for e in found if subprocess.run([e, '-c', ''], cwd=tmp_path, capture_output=True).returncode == 0), None)        # there are some that only tell how to get it
    if exe is None: pytest.skip(f'there is no Python {version} on this machine')
    run(exe, '-W', 'error', '-c', 'import sys; [compile(open(f, "rb").read(), f, "exec") for f in sys.argv[1:]]', *files, cwd=tmp_path)

def test_import_is_quick(tmp_path):
    "After `fastai.vision.all` all our modules take less than half as long; one quiet moment of three will do."
    mods = ', '.join(f'kshot_nas.{p.stem}' for p in sorted((root/'kshot_nas').glob('[a-z]*.py')))
    prog = f'from time import process_time as t; a = t(); import fastai.vision.all; b = t(); import {mods}; print((t()-a)/(b-a))'
    ratios = (float(run(sys.executable, '-W', 'ignore', '-c', prog, cwd=tmp_path, PYTHONPATH=str(root))) for _ in range(3))
    assert any(r < 1.5 for r in ratios)

@pytest.mark.skipif(not Path('/dev/null').exists(), reason='this system has no place that even root cannot write to')
def test_no_home_and_an_ascii_locale(tmp_path):
    "Names of folders that Python can't read in this locale come out as they are, in the terminal and in the files."
    command,rng = Path(sys.executable).with_name('kshot_search'),np.random.default_rng(0)
    if not command.exists(): pytest.skip('kshot_search is not installed beside this Python')
    for c in 'Käse', 'brød':
        (tmp_path/'Gemüse'/c).mkdir(parents=True)
        for i in range(8): Image.fromarray(rng.integers(0, 255, (16,16,3), dtype=np.uint8)).save(tmp_path/f'Gemüse/{c}/{i}.png')
    nowhere = dict(HOME='/dev/null', **dict.fromkeys(('MPLCONFIGDIR', 'XDG_CACHE_HOME', 'XDG_CONFIG_HOME', 'FASTAI_HOME', 'TORCH_HOME')))
    out = run(command, '--data', 'Gemüse', *'--size 16 --bs 4 --k 2 --epochs 1 --pop 4 --gens 1 --retrain-epochs 1'.split(), cwd=tmp_path,
              **nowhere, LC_ALL='C', PYTHONUTF8='0', PYTHONIOENCODING=None)
    assert 'Gemüse: 2 classes' in out
    folder = tmp_path/'runs/Gemüse'
    assert 'Käse, brød' in (folder/'report.html').read_text(encoding='utf-8')
    for name in 'card.md', 'log.txt': assert 'Gemüse' in (folder/name).read_text(encoding='utf-8')

script = '''
import warnings; warnings.filterwarnings('ignore')
from fastai.vision.all import *
from fastai.distributed import *
from kshot_nas.study.bench import DigitsBench
from kshot_nas.learner import kshot_learner
bench = DigitsBench()
learn = kshot_learner(bench.dls(repeat=1), bench.supernet, k=2, n_paths=2, warmup=0)
with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(): learn.fit_kshot(1, lr=0.01)
print(len(learn.code_recorder.steps), 'steps')
'''

@pytest.mark.slow
def test_accelerate_launch(tmp_path):
    "That two processes train as one is tested with processes that are started in the same way"
    pytest.importorskip('accelerate')
    (tmp_path/'train.py').write_text(script)
    launch = [sys.executable, '-m', 'accelerate.commands.launch', '--cpu', '--num_processes', '1', '--num_machines', '1', '--mixed_precision', 'no', '--dynamo_backend', 'no']
    assert run(*launch, 'train.py', cwd=tmp_path, PYTHONPATH=str(root)).split()[-2:] == ['6', 'steps']
