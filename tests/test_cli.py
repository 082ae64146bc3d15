"The command `kshot_search`: what it leaves behind, interrupted, and asked for what can't be."
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kshot_nas.app import cli, plan
from kshot_nas.tiny import tiny_supernet

command = Path(sys.executable).with_name('kshot_search')
pytestmark = pytest.mark.skipif(not command.exists(), reason='kshot_search is not installed beside this Python')
small = '--k 2 --epochs 3 --bs 300 --pop 6 --gens 3 --retrain-epochs 1 --trials 1'.split()

def start(*argv, cwd):
    def listen(): signal.signal(signal.SIGINT, signal.SIG_DFL)      # whoever runs the tests in the background has made us deaf to Ctrl-C
    env = {**os.environ, 'OMP_NUM_THREADS': '1'}
    return subprocess.Popen([command, *map(str, argv)], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, preexec_fn=listen)

def run(*argv, cwd):
    proc = start(*argv, cwd=cwd)
    out,err = proc.communicate(timeout=300)
    return proc.returncode,out,err

def figures(folder): return re.findall(r'<svg.*?</svg>', (folder/'report.html').read_text(encoding='utf-8'), flags=re.S)

@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "A run that nobody has disturbed: its folder, and what it printed"
    here = tmp_path_factory.mktemp('whole')
    status,out,err = run(*small, cwd=here)
    assert (status, err) == (0, ''), err
    return here/'runs/digits',out

def images(folder, classes=('cat', 'dog'), n=8):
    "A folder of images that show nothing"
    rng = np.random.default_rng(0)
    for c in classes:
        (folder/c).mkdir(parents=True)
        for i in range(n): Image.fromarray(rng.integers(0, 255, (16,16,3), dtype=np.uint8)).save(folder/c/f'{i}.jpg')
    return folder

# What it does ----------------------------------------------------------------------------------------------------------------

def test_leaves_everything_behind(whole):
    folder,out = whole
    names = {'archive.sqlite', 'best.json', 'card.md', 'checkpoints', 'codes.npy', 'config.json', 'log.txt', 'model.pt', 'report.html', 'results.csv', 'training.csv'}
    assert {p.name for p in folder.iterdir()} == names
    assert str(Path('runs/digits/report.html')) in out and len(figures(folder)) == 6
    assert '\r' not in out and '\x1b' not in out, 'progress bars in a log'
    config = json.loads((folder/'config.json').read_text())
    assert config['command'] == 'kshot_search ' + ' '.join(small) and config['settings']['k'] == 2
    assert len(re.findall(r'epoch \d/3', (folder/'log.txt').read_text())) == 3

def test_help_comes_at_once(tmp_path):
    status,out,err = run('--help', cwd=tmp_path)
    assert (status, err) == (0, '') and '--max-flops' in out and max(map(len, out.splitlines())) <= 120
    subprocess.run([sys.executable, '-c', 'import sys, kshot_nas.app.cli; assert "torch" not in sys.modules'], check=True)

def test_dry_run_writes_nothing(tmp_path):
    status,out,err = run('--dry-run', '--max-flops', '120k', cwd=tmp_path)
    assert (status, err) == (0, '') and '120,000 multiply-adds' in out and 'of memory' in out
    assert not list(tmp_path.iterdir())

def test_plan_is_readable(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main('--dry-run --epochs 1 --retrain-epochs 1'.split()) == 0
    out = capsys.readouterr().out
    assert 'tiny: 1,048,576 architectures of' in out and ': 1 epoch of ' in out and 'for 1 epoch\n' in out and ' MB of disk' in out

def small_space(k, n_in, n_out, size=24): return tiny_supernet(k, n_in, n_out, size)

def test_own_space_has_its_own_size(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images(tmp_path/'pets')
    argv = f'--dry-run --data pets --bs 4 --space {__name__}:small_space'.split()
    for more,size in ([], 24),(['--size', '16'], 16):
        assert cli.main([*argv, *more]) == 0
        assert f'images of 3x{size}x{size}' in capsys.readouterr().out

@pytest.mark.slow
def test_images_of_ones_own(tmp_path):
    images(tmp_path/'pets/train', n=12); images(tmp_path/'pets/test')
    status,out,err = run('--data', 'pets', '--size', 16, '--bs', 8, '--augment', *small[:4], '--pop', 4, '--gens', 2, '--retrain-epochs', 2, '--workers', 2, cwd=tmp_path)
    assert (status, err) == (0, ''), err
    config = json.loads((tmp_path/'runs/pets/config.json').read_text())
    assert config['data'] == dict(name='pets', train=19, valid=5, test=16, classes=['cat', 'dog'], shape=[3,16,16])

# Interrupted (killed: see test_faults.py) ------------------------------------------------------------------------------------

def test_interrupted(tmp_path):
    proc,log = start(*small[:2], '--epochs', 500, '--bs', 300, cwd=tmp_path),tmp_path/'runs/digits/log.txt'
    for _ in range(1200):
        if log.exists() and 'epoch 2/500' in log.read_text(): break
        time.sleep(0.1)
    proc.send_signal(signal.SIGINT)
    try: _,err = proc.communicate(timeout=60)
    finally: proc.kill()
    assert proc.returncode == 130 and err == 'kshot_search: interrupted; what was done is kept. Go on with: kshot_search --resume --out runs/digits\n'
    status,out,err = run('--resume', '--out', 'runs/digits', '--dry-run', cwd=tmp_path)
    assert (status, err) == (0, '') and 'started before' in out and '500 epochs' in out

def test_only_what_is_missing_is_made_again(whole):
    folder = whole[0]
    before = {p.name:p.stat().st_mtime_ns for p in folder.iterdir() if p.is_file() and p.name != 'log.txt'}
    page = (folder/'report.html').read_bytes()
    for name in 'report.html',None:
        if name: (folder/name).unlink()
        status,out,err = run('--resume', '--out', folder, cwd=folder.parent)
        assert (status, err) == (0, '') and ('  report   ' in out) == bool(name) and '  retrain  accuracy' not in out
    assert (folder/'report.html').read_bytes() == page
    assert all((folder/n).stat().st_mtime_ns == t for n,t in before.items() if n != 'report.html')

# Refused ---------------------------------------------------------------------------------------------------------------------

def state(folder): return {p: p.stat().st_mtime_ns for p in sorted(folder.rglob('*'))}

def test_folder_of_another_run(whole):
    folder = whole[0]
    before = state(folder)
    status,out,err = run('--k', 3, cwd=folder.parents[1])
    assert (status, out) == (2, '') and err.count('\n') == 1 and 'belongs to another run (k is 2 there and 3 here' in err
    assert state(folder) == before

def refused(capsys, here, *argv):
    "What `kshot_search` says when it refuses; nothing may change in `here`"
    before = state(here)
    try: status = cli.main([*map(str, argv)])
    except SystemExit as e: status = e.code
    out,err = capsys.readouterr()
    assert (status, out, err.count('\n')) == (2, '', 1) and state(here) == before
    return err

def test_resumed_where_there_is_no_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert 'there is no run in runs/pest to go on with: check --out' in refused(capsys, tmp_path, '--resume', '--out', 'runs/pest')

def test_bad_data(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images(tmp_path/'one', ['cat']); pets = images(tmp_path/'pets'); (tmp_path/'none').mkdir()
    assert 'there is no folder' in refused(capsys, tmp_path, '--data', 'nowhere')
    assert 'there are no images' in refused(capsys, tmp_path, '--data', 'none')
    assert 'of 1 class (cat)' in refused(capsys, tmp_path, '--data', 'one')
    assert 'fewer than a batch of 64' in refused(capsys, tmp_path, '--data', 'pets')
    (pets/'cat/0.jpg').write_bytes((pets/'cat/0.jpg').read_bytes()[:200])
    assert "1 of 16 images can't be read" in refused(capsys, tmp_path, '--data', 'pets', '--bs', 4)

def test_bad_numbers(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path/'space.py').write_text('def net(k, n_in, n_out): return 3\ndef broken(k, n_in, n_out): raise TypeError("two\\nlines")\n')
    pets = images(tmp_path/'pets')
    refusals = {'--k 0': 'k must be', '--epochs -1': 'epochs must be', '--space huge': 'choose one of', '--space gone:net': "can't be imported", '--space space:brokn': 'no function',
                '--max-flops 10': 'those of this space have', '--max-flops x': 'not a number', '--bs 3.5': 'invalid int', '--device warp': 'Try --device cpu', '--workers 0': 'at least 1',
                '--out pets/cat/0.jpg': 'is not a folder', '--out pets': 'has other files in it', '--preset mine': 'preset must be one of', '--valid-pct 100': 'percentage'}
    for argv,why in refusals.items(): assert why in refused(capsys, tmp_path, *argv.split())
    for name in 'net', 'broken': assert "can't be built" in refused(capsys, tmp_path, '--data', pets, '--bs', 4, '--space', f'space:{name}')

def test_not_enough_room(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.shutil, 'disk_usage', lambda path: type('Usage', (), dict(free=1000)))
    assert 'MB of disk, and 1.0 kB are free' in refused(capsys, tmp_path)
    monkeypatch.setattr(plan, 'free_memory', lambda device: 1000)
    assert 'MB of memory, and 1.0 kB are free' in refused(capsys, tmp_path)
    monkeypatch.setattr(cli.os, 'access', lambda *args: False)
    assert "can't be written to" in refused(capsys, tmp_path)
