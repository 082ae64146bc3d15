"The command `kshot_search`: what it leaves behind, interrupted, and asked for what can't be."
import io
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
import torch
from PIL import Image
from torchvision.models import resnet18

from kshot_nas.app import cli, plan
from kshot_nas.app.folder import RunFolder
from kshot_nas.export import missing_for_onnx
from kshot_nas.tiny import tiny_supernet

command = Path(sys.executable).with_name('kshot_search')
pytestmark = pytest.mark.skipif(not command.exists(), reason='kshot_search is not installed beside this Python')
onnx_files = () if missing_for_onnx() else ('model.onnx', 'use.py')
small = '--k 2 --epochs 3 --bs 300 --pop 6 --gens 3 --finalists 2 --retrain-epochs 1 --trials 1'.split()

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
    names = {'archive.sqlite', 'best.json', 'card.md', 'checkpoints', 'codes.npy', 'config.json', 'finals.csv', 'log.txt', *onnx_files, 'model.pt', 'report.html', 'results.csv', 'training.csv'}
    assert {p.name for p in folder.iterdir()} == names
    assert str(Path('runs/digits/report.html')) in out and len(figures(folder)) == 7
    assert '\r' not in out and '\x1b' not in out, 'progress bars in a log'
    config = json.loads((folder/'config.json').read_text())
    assert config['command'] == 'kshot_search ' + ' '.join(small) and config['settings']['k'] == 2
    assert len(re.findall(r'supernet, epoch \d/3:', (folder/'log.txt').read_text())) == 3     # not the lines about the time that is left

def test_help_comes_at_once(tmp_path):
    status,out,err = run('--help', cwd=tmp_path)
    assert (status, err) == (0, '') and '--max-flops' in out and max(map(len, out.splitlines())) <= 120
    subprocess.run([sys.executable, '-c', 'import sys, kshot_nas.app.cli; assert "torch" not in sys.modules'], check=True)

def test_imports_without_a_warning():
    res = subprocess.run([sys.executable, '-c', 'import kshot_nas.all'], env={k:v for k,v in os.environ.items() if k != 'PYTHONWARNINGS'}, capture_output=True, text=True)
    assert (res.returncode, res.stderr) == (0, '')

def test_dry_run_writes_nothing(tmp_path):
    status,out,err = run('--dry-run', '--max-flops', '120k', cwd=tmp_path)
    assert (status, err) == (0, '') and '120,000 multiply-adds' in out and 'of memory' in out
    assert not list(tmp_path.iterdir())

def test_plan_is_readable(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main('--dry-run --epochs 1 --retrain-epochs 1'.split()) == 0
    out = capsys.readouterr().out
    assert 'tiny: 1,048,576 architectures of' in out and ': 1 epoch of ' in out and 'for 1 epoch, with' in out and ' MB of disk' in out

def small_space(k, n_in, n_out, size=24): return tiny_supernet(k, n_in, n_out, size)

def test_own_space_has_its_own_size(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images(tmp_path/'pets')
    argv = f'--dry-run --data pets --bs 4 --space {__name__}:small_space'.split()
    for more,size in ([], 24),(['--size', '16'], 16):
        assert cli.main([*argv, *more]) == 0
        assert f'images of 3x{size}x{size}' in capsys.readouterr().out

def test_known_networks_as_spaces(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images(tmp_path/'pets')
    torch.save(resnet18(num_classes=7).state_dict(), tmp_path/'weights.pth')
    argv = '--dry-run --data pets --bs 4 --k 2 --size 32 --space torchvision:resnet18'.split()
    assert cli.main([*argv, '--weights', 'weights.pth']) == 0
    assert 'torchvision:resnet18: 2,097,152 architectures' in capsys.readouterr().out
    (tmp_path/'weights.pth').write_text('none')
    assert 'weights.pth' in refused(capsys, tmp_path, *argv, '--weights', 'weights.pth')
    assert 'has no network' in refused(capsys, tmp_path, *argv[:-1], 'torchvision:resnet17')
    assert '--weights are for networks' in refused(capsys, tmp_path, '--data', 'pets', '--bs', 4, '--weights', 'weights.pth')

@pytest.mark.slow
def test_images_of_ones_own(tmp_path):
    images(tmp_path/'pets/train', n=12); images(tmp_path/'pets/test')
    status,out,err = run('--data', 'pets', '--size', 16, '--bs', 8, '--augment', *small[:4], '--pop', 4, '--gens', 2, '--finalists', 2, '--retrain-epochs', 2, '--workers', 2, cwd=tmp_path)
    assert (status, err) == (0, ''), err
    config = json.loads((tmp_path/'runs/pets/config.json').read_text())
    assert config['data'] == dict(name='pets', train=20, valid=4, test=16, classes=['cat', 'dog'], shape=[3,16,16], chance=0.5)

# Interrupted (killed: see below) ---------------------------------------------------------------------------------------------

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
        assert (status, err) == (0, '') and ('  report   ' in out) == bool(name) and '  retrain  test accuracy' not in out
    assert (folder/'report.html').read_bytes() == page
    assert all((folder/n).stat().st_mtime_ns == t for n,t in before.items() if n != 'report.html')

@pytest.mark.parametrize('deaf', ['closed', 'gone', 'full'])
def test_nobody_listens(whole, deaf):
    "No standard output at all, a pipe that nobody reads, and a full disk behind it: the files are what counts"
    folder = whole[0]
    (folder/'report.html').unlink()
    read,write = os.pipe()
    os.close(read)
    out = dict(closed=None, gone=write, full=os.open('/dev/full', os.O_WRONLY) if Path('/dev/full').exists() else write)[deaf]
    res = subprocess.run([command, '--resume', '--out', folder], stdout=out, stderr=subprocess.PIPE, preexec_fn=(lambda: os.close(1)) if out is None else None)
    assert (res.returncode, res.stderr) == (0, b'') and (folder/'report.html').exists()

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
                '--max-flops 10': 'those of this space have', '--max-flops x': 'not a number', '--bs 3.5': 'invalid int', '--device warp': 'Try --device cpu', '--workers 0': 'workers must be an int from 1 to', f'--workers {8*os.cpu_count()+1}': 'workers must be an int from 1 to',
                '--out pets/cat/0.jpg': 'is not a folder', '--out pets': 'has other files in it', '--preset mine': 'preset must be one of', '--valid-pct 100': 'percentage'}
    for argv,why in refusals.items(): assert why in refused(capsys, tmp_path, *argv.split())
    for name in 'net', 'broken': assert "can't be built" in refused(capsys, tmp_path, '--data', pets, '--bs', 4, '--space', f'space:{name}')

def test_not_enough_room(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if Path('/proc').is_dir(): assert "/proc can't be written to: use another --out" in refused(capsys, tmp_path, '--out', '/proc/foo')
    monkeypatch.setattr(cli.shutil, 'disk_usage', lambda path: type('Usage', (), dict(free=1000, total=2000)))
    assert 'MB of disk, and 1.0 kB are free' in refused(capsys, tmp_path)
    for free,words in (1000, 'kB of memory, and 1.0 kB are free'), (10**6, 'MB of memory, and 1.0 MB are free'):
        monkeypatch.setattr(plan, 'free_memory', lambda device: free)      # for a batch of images; for the whole plan
        assert words in refused(capsys, tmp_path)
    monkeypatch.setattr(cli.os, 'access', lambda *args: False)
    assert "can't be written to" in refused(capsys, tmp_path)

# Killed, out of room, not allowed to write, robbed of its images, with damaged files, and twice at once -----------------------

import functools  # noqa: E402
import itertools  # noqa: E402
import random  # noqa: E402
import resource  # noqa: E402
import shutil  # noqa: E402
from collections import Counter  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from datetime import datetime  # noqa: E402
from multiprocessing import get_all_start_methods, get_context  # noqa: E402

import pandas as pd  # noqa: E402

pytestmark = [pytestmark, pytest.mark.skipif('forkserver' not in get_all_start_methods(), reason='this system cannot fork processes')]
stages = 'train', 'rank', 'search', 'finals', 'retrain', 'report'
light  = '--k 2 --epochs 4 --bs 150 --pop 6 --gens 3 --finalists 3 --retrain-epochs 2 --trials 2'.split()
again  = 'kshot_search: {}; what was done is kept. Go on with: kshot_search --resume --out runs/digits\n'
slow_to_import = ['kshot_nas.app.cli', 'kshot_nas.app.run', 'kshot_nas.study.bench', 'kshot_nas.retrain', 'torch._dynamo']
names  = 'results.csv', 'finals.csv', 'best.json', 'training.csv', 'codes.npy', 'card.md', 'model.pt', *onnx_files, 'report.html', 'config.json'

# The job, in a process of its own ---------------------------------------------------------------------------------------------

def lighten():
    "Few training images, and few architectures to rank: seconds instead of a minute"
    from kshot_nas.app import plan
    from kshot_nas.study import bench
    dls,task = bench.DigitsBench.dls,plan.digits_task
    def few(*args):
        res = task(*args)
        res.truth = res.truth[:20]
        return res
    bench.DigitsBench.dls = lambda self, bs: dls(self, bs, repeat=1)
    plan.digits_task = few

def note_evaluations():
    "Append what is evaluated to the file `evaluated`, before it is"
    from kshot_nas.learner import KShotLearner
    real = KShotLearner.eval_arch
    @functools.wraps(real)
    def eval_arch(self, arch, *args, **kwargs):
        with open('evaluated', 'a') as f: f.write(f'{arch}\n')
        return real(self, arch, *args, **kwargs)
    KShotLearner.eval_arch = eval_arch

def job(argv, here, hook, args):
    "What `kshot_search` does, with its words in the files `out` and `err`"
    os.chdir(here)
    for fd,name in (1, 'out'),(2, 'err'):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    lighten()
    note_evaluations()
    if hook: hook(*args)
    sys.exit(cli.main(argv))

@contextmanager
def started(here, *argv, hook=None, args=()):
    ctx = get_context('forkserver')
    ctx.set_forkserver_preload(slow_to_import)
    proc = ctx.Process(target=job, args=([*map(str, argv)], here, hook, args), daemon=True)
    with pytest.MonkeyPatch.context() as m:                                         # the server that forks it off is started with it
        for name,value in dict(OMP_NUM_THREADS='1', PYTHONWARNINGS='ignore').items(): m.setenv(name, value)
        proc.start()
    try: yield proc
    finally: proc.kill(); proc.join()

def words(here): return (here/'out').read_text(),(here/'err').read_text()

def job_run(here, *argv, **kwargs):
    "Exit code, what it said, and what it complained about"
    here.mkdir(exist_ok=True)
    with started(here, *argv, **kwargs) as proc:
        proc.join(600)
        assert proc.exitcode is not None, 'it hangs'
    return proc.exitcode,*words(here)

took = r' \([\d,]+ s\)'                                              # ends the line of a stage that is over; others tell the time that is left

def log(here): return file.read_text() if (file := here/'runs/digits/log.txt').exists() else ''

@pytest.fixture(scope='module')
def calm(tmp_path_factory):
    "A run that nobody has disturbed"
    here = tmp_path_factory.mktemp('calm')
    code,out,err = job_run(here, *light)
    assert (code, err) == (0, ''), err
    return here

@pytest.fixture(scope='module')
def seconds(calm):
    "How long each of its stages has taken"
    told = re.findall(r'^(\S+ \S+) INFO (kshot_search|\w+(?=  .*' + took + '))', log(calm), flags=re.M)
    at = {what:datetime.strptime(when, '%Y-%m-%d %H:%M:%S,%f').timestamp() for when,what in told}
    assert list(at) == ['kshot_search', *stages]
    return {b:at[b]-at[a] for a,b in zip(at, stages)}

@pytest.fixture
def copy(calm, tmp_path):
    "A copy of it, to be damaged"
    shutil.copytree(calm, tmp_path, dirs_exist_ok=True)
    return tmp_path

def same(here, calm):
    "Raise an error unless the run in `here` has ended like the one in `calm`"
    a,b = here/'runs/digits',calm/'runs/digits'
    for name in names: assert (a/name).read_bytes() == (b/name).read_bytes(), name
    def every(folder): return sorted(p.relative_to(folder) for p in folder.rglob('*') if not p.name.startswith('epoch_'))
    assert every(a) == every(b)                                                     # nothing missing, nothing left behind; of checkpoints there may be one more

def nothing_twice(here, calm, kills):
    "Raise an error if the run in `here`, ended `kills` times, has done again what was done"
    epochs,evaluated = [Counter(re.findall(r'INFO (\w+.*, epoch \d+)/\d+:', log(h))) for h in (here, calm)],[Counter((h/'evaluated').read_text().split()) for h in (here, calm)]
    assert max(epochs[0].values()) == 1 and not epochs[0] - epochs[1] and (epochs[1] - epochs[0]).total() <= kills      # killed between the checkpoint and the log
    assert set(evaluated[0]) == set(evaluated[1]) and (evaluated[0] - evaluated[1]).total() <= kills                    # those that were under way

# Killed ------------------------------------------------------------------------------------------------------------------------

def kill(here, stage, delay, number, *argv):
    "Start or resume the job, end it with signal `number` a `delay` after `stage` has begun; the stage it was in, or `None` if it was over"
    old,i = log(here),stages.index(stage)
    begun = rf'INFO {stages[i-1]}(  .*{took}|: done)' if i else 'INFO kshot_search'
    with started(here, *light, *argv, *(['--resume'] if old else [])) as proc:
        while proc.is_alive() and not re.search(begun, log(here)[len(old):]): time.sleep(0.005)
        proc.join(delay)
        if proc.is_alive(): os.kill(proc.pid, number)
        proc.join(300)
    if 'INFO report  ' in log(here): return None
    assert proc.exitcode == (-number if number == signal.SIGKILL else 128+number)
    assert words(here)[1] == {signal.SIGKILL: '', signal.SIGINT: again.format('interrupted'), signal.SIGTERM: again.format('terminated')}[number]
    return next(s for s in stages if not re.search(rf'INFO {s}  .*{took}', log(here)))

signals = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]

def test_killed_three_times(calm, seconds, tmp_path, rng):
    for stage,number in zip(sorted(rng.sample(stages, 3), key=stages.index), rng.sample(signals, 3)): kill(tmp_path, stage, rng.uniform(0, seconds[stage]), number)
    code,_,err = job_run(tmp_path, *light, '--resume')
    assert (code, err) == (0, ''), err
    same(tmp_path, calm)
    nothing_twice(tmp_path, calm, kills=3)

@pytest.mark.slow
def test_killed_in_every_stage_by_every_signal(calm, seconds, tmp_path, rng):
    left,hit = Counter({(stage, number):1 for stage in stages for number in signals}),[]
    for chain in range(12):
        plan = [(stage, rng.choice([n for s,n in left if s == stage] or signals)) for stage in stages]
        here = tmp_path/f'{chain}'
        here.mkdir()
        landed = [(hit_in, number) for stage,number in plan if (hit_in := kill(here, stage, rng.uniform(0, seconds[stage]), number))]
        code,_,err = job_run(here, *light, '--resume')
        assert (code, err) == (0, ''), err
        same(here, calm)
        nothing_twice(here, calm, kills=5)
        hit += landed
        left -= Counter(landed)
        if not left and len(hit) >= 20: break
    assert not left and len(hit) >= 20, f'hit {hit}, not {list(left)}'

def copy_at_publications():
    "Copy all that is there whenever a file has been given its name: what a SIGKILL at that moment would leave behind"
    real,number = os.replace,itertools.count(1)
    def replace(*args):
        real(*args)
        (copy := Path('..')/f'copy{next(number)}').mkdir()
        shutil.copytree('runs', copy/'runs')
        if Path('evaluated').exists(): shutil.copy('evaluated', copy)
    os.replace = replace

@pytest.mark.slow
def test_killed_after_every_publication(calm, tmp_path):
    assert job_run(tmp_path/'first', *light, hook=copy_at_publications)[::2] == (0, '')
    copies = sorted(tmp_path.glob('copy*'), key=lambda p: int(p.name[4:]))
    assert len(copies) > 20
    for here in copies:
        assert job_run(here, *light, '--resume')[::2] == (0, ''), here
        same(here, calm)
        nothing_twice(here, calm, kills=1)

@pytest.mark.slow
def test_killed_while_others_evaluate(calm, tmp_path):
    kill(tmp_path, 'search', 0., signal.SIGKILL)
    for number in signals: kill(tmp_path, 'search', random.uniform(2, 8), number, '--workers', 2)
    code,_,err = job_run(tmp_path, *light, '--resume')
    assert (code, err) == (0, ''), err
    same(tmp_path, calm)

# Two at once ------------- -----------------------------------------------------------------------------------------------------

def test_two_at_once(calm, tmp_path):
    with started(tmp_path, *light) as proc:
        while 'epoch 1/4' not in log(tmp_path) and proc.is_alive(): time.sleep(0.005)
        os.kill(proc.pid, signal.SIGSTOP)
        before = {p:p.stat().st_mtime_ns for p in (tmp_path/'runs/digits').rglob('*')}
        code,_,err = job_run(tmp_path/'other', *light, '--out', tmp_path/'runs/digits')
        assert code == 2 and err == f"kshot_search: another kshot_search is at work in {tmp_path/'runs/digits'}: wait for it, stop it, or use another --out\n"
        assert {p:p.stat().st_mtime_ns for p in (tmp_path/'runs/digits').rglob('*')} == before
        os.kill(proc.pid, signal.SIGCONT)
        proc.join(300)
        assert proc.exitcode == 0
    same(tmp_path, calm)

# No room, no permission --------------------------------------------------------------------------------------------------------

def die_after(count):
    "End this process, as SIGKILL does, when it has given `count` files their names"
    real,number = os.replace,itertools.count(1)
    def replace(*args):
        real(*args)
        if next(number) == count: os.kill(os.getpid(), signal.SIGKILL)
    os.replace = replace

def advance(here, count=1, argv=light):
    "Start or resume a run, and let it write `count` files"
    assert job_run(here, *argv, hook=die_after, args=(count,))[0] == -signal.SIGKILL

def test_full_disk(calm, disk, tmp_path):
    (tmp_path/'runs').symlink_to(disk)
    for count in 2,7,9:                                                             # files to write before: stops in training, search and retraining
        advance(tmp_path, count)
        (disk/'ballast').write_bytes(b'0'*shutil.disk_usage(disk).free)
        code,_,err = job_run(tmp_path, *light, '--resume')
        assert code == 1 and err.count('\n') == 1 and ('No space left on device' in err or 'disk is full' in err or 'disk I/O error' in err), err
        (disk/'ballast').unlink()
    assert job_run(tmp_path, *light, '--resume')[::2] == (0, '')
    same(tmp_path, calm)
    nothing_twice(tmp_path, calm, kills=6)

def limit(size): resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def test_files_that_may_not_grow(calm, tmp_path):
    "Where no disk can be mounted: a limit on the size of files"
    advance(tmp_path)
    code,_,err = job_run(tmp_path, *light, hook=limit, args=(60_000,))
    assert code == 1 and err.count('\n') == 1 and 'File too large' in err, err
    assert job_run(tmp_path, *light)[::2] == (0, '')
    same(tmp_path, calm)

@contextmanager
def read_only(path):
    "Let nobody write to a file or folder"
    if os.geteuid(): path.chmod(0o555 if path.is_dir() else 0o444)
    else:                                                                           # whom permissions don't stop
        if subprocess.run(['mount', '--bind', path, path], capture_output=True).returncode: pytest.skip('nothing can be made read-only here')
        subprocess.run(['mount', '-o', 'remount,bind,ro', path], check=True)
    try: yield
    finally: path.chmod(0o755) if os.geteuid() else subprocess.run(['umount', path], check=True)

def test_read_only(calm, copy):
    folder = copy/'runs/digits'
    for name in 'results.csv', 'training.csv': (folder/name).unlink()
    for what,code,why in ('', 2, "can't be written to"),('log.txt', 2, 'Permission denied|Read-only'),('checkpoints', 1, 'Permission denied|Read-only'),('archive.sqlite', 1, 'Allow writing'):
        with read_only(folder/what): *res,err = job_run(copy, *light)
        assert res[0] == code and err.count('\n') == 1 and str(Path('runs/digits')/what) in err and re.search(why, err), err
    assert job_run(copy, *light)[::2] == (0, '')
    same(copy, calm)

# Images that go away -------------------------------------------------------------------------------------------------------------

pets = '--data pets --size 8 --bs 8 --k 2 --epochs 3 --pop 4 --gens 2 --finalists 2 --retrain-epochs 1'.split()

@pytest.fixture
def pets_folder(tmp_path):
    "A folder with a folder of images that show nothing"
    images(tmp_path/'pets', n=12)
    return tmp_path

def move_away(what, epoch):
    "Rename the folder of images after an epoch"
    from kshot_nas.app.pace import Follow
    real = Follow.after_epoch
    def after_epoch(self):
        real(self)
        if what in self.what and self.epoch == epoch and os.path.exists('pets'): os.rename('pets', 'gone')
    Follow.after_epoch = after_epoch

def test_images_that_go_away(pets_folder):
    here = pets_folder
    advance(here, argv=pets)
    (here/'pets').rename(here/'gone')
    code,_,err = job_run(here, *pets, '--resume')
    assert code == 2 and err == f"kshot_search: there is no folder {here/'pets'}: give a folder of images, with a folder for each class\n"
    (here/'gone').rename(here/'pets')
    (here/'pets/cat/3.jpg').rename(here/'3.jpg')
    code,_,err = job_run(here, *pets, '--resume')
    assert code == 2 and err.count('\n') == 1 and 'the images of pets are not those that the run' in err
    (here/'3.jpg').rename(here/'pets/cat/3.jpg')
    for what,epoch in ('supernet', 1),('for 1 epoch', 0):
        code,_,err = job_run(here, *pets, '--resume', hook=move_away, args=(what, epoch))
        assert code == 1 and err.count('\n') == 1 and 'FileNotFoundError' in err and str(Path('runs/pets/log.txt')) in err, err
        (here/'gone').rename(here/'pets')
    assert job_run(here, *pets, '--resume')[::2] == (0, '')
    (here/'runs/pets').rename(here/'runs/robbed')
    assert job_run(here, *pets)[::2] == (0, '')
    for name in names: assert (here/'runs/robbed'/name).read_bytes() == (here/'runs/pets'/name).read_bytes(), name

def swap(here):
    "Exchange the files of two classes"
    for a,b in ('cat', 'other'),('dog', 'cat'),('other', 'dog'): (here/'pets'/a).rename(here/'pets'/b)

def test_resumed_on_other_images(pets_folder):
    "Whatever has changed is named, and a folder that was moved as a whole is accepted"
    here = pets_folder
    advance(here, 4, argv=pets)                                                     # config, images, and a checkpoint
    swap(here)
    code,_,err = job_run(here, *pets, '--resume')
    assert code == 2 and err.count('\n') == 1 and 'are not those that the run was started with: 24 changed (cat/0.jpg, cat/1.jpg, ...)' in err, err
    swap(here)
    (here/'pets/dog/0.jpg').rename(here/'pets/dog/99.jpg')
    code,_,err = job_run(here, *pets, '--resume')
    assert code == 2 and err.count('\n') == 1 and '1 new (dog/99.jpg), 1 gone (dog/0.jpg). Restore them, or use another --out' in err, err
    (here/'pets/dog/99.jpg').rename(here/'pets/dog/0.jpg')
    (here/'moved').mkdir()
    (here/'pets').rename(here/'moved/pets')
    for argv in pets,['--resume', '--out', 'runs/pets']: assert job_run(here, *argv)[0] == 2              # not where it was
    code,out,err = job_run(here, *pets[2:], '--data', 'moved/pets', '--resume')
    assert (code, err) == (0, '') and 'started before' in out, err
    assert json.loads((here/'runs/pets/config.json').read_text())['settings']['data'] == str(here/'moved/pets')

def test_loops_and_pipes(capsys, tmp_path, monkeypatch):
    "Every image once, whatever leads to it; what is no file is passed over"
    monkeypatch.chdir(tmp_path)
    images(tmp_path/'pets', n=12)
    (tmp_path/'pets/cat/loop').symlink_to('..')
    (tmp_path/'pets/dog/loop').symlink_to('../..')
    os.mkfifo(tmp_path/'pets/cat/pipe.png')
    assert cli.main('--dry-run --data pets/cat/.. --bs 4 --size 16'.split()) == 0
    out = capsys.readouterr().out
    assert f"  out      {Path('runs/pets')};" in out
    assert 'pets: 2 classes, 20 training, 4 validation and 0 test images' in out and 'links to folders seen before' in out and '1 names that are not of files' in out

def test_names_that_steer_a_terminal(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images(tmp_path/'pets\x1b[31m\x07', n=12)
    assert cli.main(['--dry-run', '--data', 'pets\x1b[31m\x07', '--bs', '4', '--size', '16']) == 0
    assert cli.main(['--dry-run', '--data', 'gone\x1b[31m']) == 2
    out,err = capsys.readouterr()
    assert 'pets\\x1b[31m\\x07: 2 classes' in out and 'gone\\x1b[31m' in err and '\x1b' not in out + err

@pytest.mark.parametrize('encoding', ['ascii', 'utf-8'])
def test_names_that_a_terminal_lacks(encoding, capsys, tmp_path, monkeypatch):
    "They are spelled out: no reason to stop"
    monkeypatch.chdir(tmp_path)
    images(tmp_path/'pets\udce9😀', n=12)
    monkeypatch.setattr(sys, 'stdout', io.TextIOWrapper(out := io.BytesIO(), encoding=encoding))
    assert cli.main(['--dry-run', '--data', 'pets\udce9😀', '--bs', '4', '--size', '16']) == 0
    assert rf'pets\udce9{"😀" if encoding == "utf-8" else chr(92)+"U0001f600"}: 2 classes' in out.getvalue().decode()

# Damaged files -------------------------------------------------------------------------------------------------------------------

def truncated(data): return data[:len(data)//2]
def flipped(data): return data[:(i := random.randrange(len(data)*9//10))] + bytes([data[i] ^ 1 << random.randrange(8)]) + data[i+1:]      # config.json ends with its digest
def foreign(data): return b'Remember the milk.\n'*99
def empty(data): return b''
def spoil(path, damage): path.write_bytes(damage(path.read_bytes()))
damages = truncated, flipped, foreign, empty

def test_damaged_files_are_made_anew(calm, copy):
    "A file is known by its digest, so it does not matter which damage meets which file"
    files = ['training.csv', 'codes.npy', 'results.csv', 'finals.csv', 'best.json', 'model.pt', *onnx_files[:1]]
    for name,damage in zip(random.sample(files, len(files)), itertools.cycle(damages)): spoil(copy/'runs/digits'/name, damage)
    assert job_run(copy, *light, '--resume')[::2] == (0, '')
    same(copy, calm)
    nothing_twice(copy, calm, kills=0)

def test_damaged_note_of_what_was_written(calm, copy):
    spoil(copy/'runs/digits/checkpoints/written.json', random.choice(damages))
    assert job_run(copy, *light, '--resume')[::2] == (0, '')
    same(copy, calm)

@pytest.mark.parametrize('damage', damages, ids=lambda f: f.__name__)
def test_damaged_config_is_refused(damage, calm, copy, monkeypatch, capsys):
    monkeypatch.chdir(copy)
    file = copy/'runs/digits/config.json'
    spoil(file, damage)
    before = {p:p.stat().st_mtime_ns for p in file.parent.rglob('*')}
    for argv in ['--resume', '--out', 'runs/digits'],light:
        code,(out,err) = cli.main(argv),capsys.readouterr()
        assert (code, out, err.count('\n')) == (2, '', 1) and "config.json can't be read, was changed, or was not written by kshot_search: restore it, or use another --out" in err, file.read_bytes()
    assert {p:p.stat().st_mtime_ns for p in file.parent.rglob('*')} == before

@pytest.mark.parametrize('damage', [truncated, foreign], ids=lambda f: f.__name__)
def test_damaged_archive_is_told_of(damage, calm, copy):
    archive = copy/'runs/digits/archive.sqlite'
    (copy/'runs/digits/results.csv').unlink()
    spoil(archive, damage)
    code,_,err = job_run(copy, *light, '--resume')
    assert code == 1 and err.count('\n') == 1 and 'archive.sqlite cannot be used' in err and re.search('It is damaged|It is no archive', err), err
    archive.unlink()                                                                # as it says
    assert job_run(copy, *light, '--resume')[::2] == (0, '')
    same(copy, calm)

# Hostile files -------------------------------------------------------------------------------------------------------------------

def reseal(folder, **settings):
    "Change settings in `config.json`, and make its digest anew"
    files = RunFolder(folder)
    config = files.config()
    files.write_config({k:v for k,v in config.items() if k != 'digest'} | dict(settings=config['settings'] | settings))

def test_resealed_config(calm, copy, monkeypatch, capsys):
    monkeypatch.chdir(copy)
    odd = dict(k=100000, epochs='3', data=['digits'], space=3, max_flops='much', lr=None, seed=-1, finalists=[3], augment='yes', bs=0)
    for name,value in odd.items():
        shutil.copy(calm/'runs/digits/config.json', copy/'runs/digits/config.json')
        reseal(copy/'runs/digits', **{name: value})
        err = refused(capsys, copy, '--resume', '--out', 'runs/digits')
        assert ('of memory, and' if name == 'k' else f'{name} must be') in err, err

def test_nested_config(copy, monkeypatch, capsys):
    monkeypatch.chdir(copy)
    for text in '['*200_000,'{"settings":'*100_000,'{"settings": [], "data": 3}':
        (copy/'runs/digits/config.json').write_text(text)
        assert "config.json can't be read" in refused(capsys, copy, '--resume', '--out', 'runs/digits')

def test_code_of_others_is_named_again(tmp_path, monkeypatch, capsys):
    "A run folder alone can't make us import a module"
    monkeypatch.chdir(tmp_path)
    (tmp_path/'evil.py').write_text('from pathlib import Path\nPath("harm").touch()\nfrom kshot_nas.tiny import tiny_supernet as net\n')
    (tmp_path/'run').mkdir()
    RunFolder(tmp_path/'run').write_config(dict(settings=plan.complete({}) | dict(space='evil:net'), data={}))
    for argv in [],['--space', 'tiny']:
        err = refused(capsys, tmp_path, '--resume', '--out', 'run', *argv)
        assert 'if you trust it, say so with --space evil:net' in err or 'space is evil:net there and tiny here' in err
    assert not (tmp_path/'harm').exists() and 'evil' not in sys.modules

# More of the same ----------------------------------------------------------------------------------------------------------------

def test_extended(calm, tmp_path):
    "A run that has ended and is given more ends like one that was given it at once, and does nothing twice"
    less = ' '.join(light).replace('--gens 3 --finalists 3', '--gens 2 --finalists 2').replace('--trials 2', '--trials 1').split()
    assert job_run(tmp_path, *less, hook=hurry)[::2] == (0, '')
    assert job_run(tmp_path, *light, hook=hurry)[::2] == (0, '')
    for name in names: assert (tmp_path/'runs/digits'/name).read_bytes() == (calm/'runs/digits'/name).read_bytes(), name
    said = Counter(re.findall(r'INFO (\w+.*, epoch \d+)/\d+:', log(tmp_path)))                # lines on the time left don't end so
    assert max(said.values()) == 1
    code,out,err = job_run(tmp_path, *less)                                         # there is more already
    assert (code, err) == (0, '') and '3 generations' in out and '  search ' not in out.split('out ')[1]

def test_only_needed_checkpoints_are_left(calm):
    folder = calm/'runs/digits/checkpoints'
    assert [len(list(d.glob('epoch_*.pt'))) for d in (folder/'supernet', folder/'alone')] == [1, 0]
    assert sum(1 for _ in (folder/'alone').rglob('epoch_*.pt')) == 4 + 2 and sum(1 for _ in (folder/'alone').rglob('curve-*.csv')) > 2*2

def test_useless_budgets_are_told(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for most,why in ('5M', 'note     nearly all architectures meet the budget'),('9500', 'note     hardly any architecture meets the budget'),('100k', None):
        assert cli.main(['--dry-run', '--max-flops', most]) == 0
        out = capsys.readouterr().out
        assert (why in out and re.search(r'try \d+\.\dk to \d+\.\dk', out)) if why else 'note  ' not in out

def test_dry_run_says_how_long(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(['--dry-run']) == 0
    assert re.search(r'time     train \d+ (s|min), rank .*, search .*, finals .*, retrain .*: about .* in all on this machine', capsys.readouterr().out)

def hurry():
    "Let a run tell its pace all the time"
    from kshot_nas.app.pace import Pace
    init = Pace.__init__
    def eager(self, work, say, every=0.): init(self, work, say, every)
    Pace.__init__ = eager

def test_lines_in_a_pipe(tmp_path):
    code,out,err = job_run(tmp_path, *light, hook=hurry)
    assert (code, err) == (0, '') and '\r' not in out and 'runs/digits/log.txt tells more' in out
    for stage,what in dict(train='supernet, epoch 1/4', rank='7 of 20 architectures', search='9 of 18 architectures', finals='for 1 epoch with seed 0, epoch 1/1', retrain='with seed 1, epoch 2/2').items():
        assert re.search(rf'  {stage:8} .*{re.escape(what)}; about .* left, until \d\d:\d\d', out), what

# Used by others ------------------------------------------------------------------------------------------------------------------

refuse = """import runpy, sys
class Refuse:
    def find_spec(self, name, *args):
        if name.split('.')[0] in ('kshot_nas', 'torch', 'torchvision', 'fastai', 'fastcore', 'onnx', 'pandas', 'sklearn'): raise ImportError(name)
sys.meta_path.insert(0, Refuse())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""

def shades(folder, n, seed):
    "JPEGs and PNGs of several sizes, dark and bright ones, in front of so much noise that some are hard to tell"
    rng = np.random.default_rng(seed)
    for c,light in ('dark', 100),('bright', 140):
        (folder/c).mkdir(parents=True)
        for i in range(n):
            shape,kind = ((20,30,3), 'jpg') if i % 2 else ((17,12,3), 'png')
            Image.fromarray((rng.normal(light, 25) + rng.normal(0, 30, shape)).clip(0, 255).astype(np.uint8)).save(folder/c/f'{i}.{kind}')

def test_used_without_this_library(tmp_path):
    "What a person has who has onnxruntime, numpy and Pillow: the accuracy that the card states"
    for m in 'onnx', 'onnxscript', 'onnxruntime': pytest.importorskip(m)
    shades(tmp_path/'shades/train', 60, 0); shades(tmp_path/'shades/test', 50, 1)
    code,_,err = job_run(tmp_path, *'--data shades --size 12 --bs 16 --k 2 --epochs 2 --pop 4 --gens 2 --finalists 2 --retrain-epochs 6 --int8'.split())
    assert (code, err) == (0, ''), err
    folder,files = tmp_path/'runs/shades',sorted((tmp_path/'shades/test').rglob('*.*'))
    res = subprocess.run([sys.executable, '-c', refuse, folder/'use.py', *files], cwd=tmp_path, capture_output=True, text=True)
    assert res.returncode == 0, res.stderr
    said = [line.split()[0] for line in res.stdout.splitlines()]
    right = np.mean([c == f.parent.name for c,f in zip(said, files, strict=True)])
    card,report = (folder/'card.md').read_text(),(folder/'report.html').read_text()
    assert f'| retrained | {right:.4f} |' in card and 0.6 < right < 1, (right, card[:400])
    assert re.search(r'\| int8 \| 0\.\d{4} \|', card) and 'model_int8.onnx, with numbers of 8 bits, has 0.' in report
    lines = (folder/'use.py').read_text()
    assert lines in card and len(list(filter(None, lines.splitlines()))) <= 11 and 'InferenceSession' in report and f'accuracy of {right:.4f}' in report
    about = json.loads((folder/'best.json').read_text())
    assert about['accuracy']['chance'] == 0.5 and about['files'] == ['model.pt', 'model.onnx', 'use.py', 'model_int8.onnx']

# Evaluations that fail -------------------------------------------------------------------------------------------------------------

def break_an_operation():
    "Let evaluations fail of architectures that end with one operation"
    from kshot_nas.learner import KShotLearner
    real = KShotLearner.eval_arch
    @functools.wraps(real)
    def eval_arch(self, arch, *args, **kwargs):
        if arch.ops[-1] == 2: raise RuntimeError('two\nlines')
        return real(self, arch, *args, **kwargs)
    KShotLearner.eval_arch = eval_arch

def test_evaluations_that_fail(tmp_path):
    assert job_run(tmp_path, *light, hook=break_an_operation)[::2] == (0, '')
    rows = pd.read_csv(tmp_path/'runs/digits/results.csv')
    broken,search = rows.arch.str.contains('-2_'),rows.stage == 'search'
    assert (rows.failure[broken & search] == 'lines').all() and (broken & search).any() and not (broken & (rows.stage == 'rank')).any()
    assert rows.failure[~broken].isna().all() and rows.accuracy[~broken].notna().all()
    assert not json.loads((tmp_path/'runs/digits/best.json').read_text())['ops'][-1] == 'conv1'

# Nowhere to write but here, and a terminal that knows only ASCII --------------------------------------------------------------

@pytest.mark.skipif(not Path('/dev/null').exists(), reason='this system has no place that even root cannot write to')
def test_no_home_and_an_ascii_locale(tmp_path):
    "Names of folders that Python can't read in this locale come out as they are, in the terminal and in the files."
    images(tmp_path/'Gemüse', ['Käse', 'brød'])
    gone = 'MPLCONFIGDIR', 'XDG_CACHE_HOME', 'XDG_CONFIG_HOME', 'FASTAI_HOME', 'TORCH_HOME', 'PYTHONIOENCODING'
    env = {k:v for k,v in os.environ.items() if k not in gone} | dict(OMP_NUM_THREADS='1', HOME='/dev/null', LC_ALL='C', PYTHONUTF8='0')
    argv = '--size 16 --bs 4 --k 2 --epochs 1 --pop 4 --gens 1 --finalists 2 --retrain-epochs 1'.split()
    res = subprocess.run([command, '--data', 'Gemüse', *argv], cwd=tmp_path, env=env, capture_output=True, timeout=600)
    assert res.returncode == 0 and 'Gemüse: 2 classes' in res.stdout.decode(encoding='utf-8'), res.stderr.decode(errors='replace')
    folder = tmp_path/'runs/Gemüse'
    assert 'Käse, brød' in (folder/'report.html').read_text(encoding='utf-8')
    for name in 'card.md', 'log.txt': assert 'Gemüse' in (folder/name).read_text(encoding='utf-8')
