"The main job: killed at any moment, out of room, not allowed to write, robbed of its images, with damaged files, under a clock that jumps, and twice at once."
import functools
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from datetime import datetime
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from kshot_nas.app.cli import main

pytestmark = pytest.mark.skipif('forkserver' not in get_all_start_methods(), reason='this system cannot fork processes')
stages = 'train', 'rank', 'search', 'retrain', 'report'
small  = '--k 2 --epochs 4 --bs 150 --pop 6 --gens 3 --retrain-epochs 2 --trials 1'.split()
again  = 'kshot_search: {}; what was done is kept. Go on with: kshot_search --resume --out runs/digits\n'
names  = 'results.csv', 'best.json', 'training.csv', 'codes.npy', 'card.md', 'model.pt', 'report.html', 'config.json'

# The job, in a process of its own ---------------------------------------------------------------------------------------------

def lighten():
    "Few training images, and few architectures to rank: seconds instead of a minute"
    from kshot_nas import bench, plan
    dls,task = bench.DigitsBench.dls,plan._digits_task
    def few(*args):
        res = task(*args)
        res.truth = res.truth[:20]
        return res
    bench.DigitsBench.dls = lambda self, bs: dls(self, bs, repeat=1)
    plan._digits_task = few

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
    for fd,name in (1, 'out'),(2, 'err'): os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    lighten()
    note_evaluations()
    if hook: hook(*args)
    sys.exit(main(argv))

@contextmanager
def started(here, *argv, hook=None, args=()):
    proc = get_context('forkserver').Process(target=job, args=([*map(str, argv)], here, hook, args), daemon=True)
    proc.start()
    try: yield proc
    finally: proc.kill(); proc.join()

def words(here): return (here/'out').read_text(),(here/'err').read_text()

def run(here, *argv, **kwargs):
    "Exit code, what it said, and what it complained about"
    here.mkdir(exist_ok=True)
    with started(here, *argv, **kwargs) as proc:
        proc.join(600)
        assert proc.exitcode is not None, 'it hangs'
    return proc.exitcode,*words(here)

def log(here): return file.read_text() if (file := here/'runs/digits/log.txt').exists() else ''

@pytest.fixture(scope='module', autouse=True)
def processes():
    "A server that imports what is slow to import once, and then forks off processes"
    with pytest.MonkeyPatch.context() as m:
        m.setenv('OMP_NUM_THREADS', '1')
        m.setenv('PYTHONWARNINGS', 'ignore')
        get_context('forkserver').set_forkserver_preload(['kshot_nas.app.cli', 'kshot_nas.app.run', 'kshot_nas.study.bench', 'kshot_nas.retrain', 'torch._dynamo'])
        yield

@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "A run that nobody has disturbed"
    here = tmp_path_factory.mktemp('whole')
    code,out,err = run(here, *small)
    assert (code, err) == (0, ''), err
    return here

@pytest.fixture(scope='module')
def seconds(whole):
    "How long each of its stages has taken"
    told = re.findall(r'^(\S+ \S+) INFO (kshot_search|\w+(?=  ))', log(whole), flags=re.M)
    at = {what:datetime.strptime(when, '%Y-%m-%d %H:%M:%S,%f').timestamp() for when,what in told}
    assert list(at) == ['kshot_search', *stages]
    return {b:at[b]-at[a] for a,b in zip(at, stages)}

@pytest.fixture
def copy(whole, tmp_path):
    "A copy of it, to be damaged"
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    return tmp_path

def same(here, whole):
    "Raise an error unless the run in `here` has ended like the one in `whole`"
    a,b = here/'runs/digits',whole/'runs/digits'
    for name in names: assert (a/name).read_bytes() == (b/name).read_bytes(), name
    def every(folder): return sorted(p.relative_to(folder) for p in folder.rglob('*') if not p.name.startswith('epoch_'))
    assert every(a) == every(b)                                                     # nothing missing, nothing left behind; of checkpoints there may be one more

def nothing_twice(here, whole, kills):
    "Raise an error if the run in `here`, ended `kills` times, has done again what was done"
    epochs,evaluated = [Counter(re.findall(r'INFO (\w+.*, epoch \d+)/', log(h))) for h in (here, whole)],[Counter((h/'evaluated').read_text().split()) for h in (here, whole)]
    assert max(epochs[0].values()) == 1 and not epochs[0] - epochs[1] and (epochs[1] - epochs[0]).total() <= kills      # killed between the checkpoint and the log
    assert set(evaluated[0]) == set(evaluated[1]) and (evaluated[0] - evaluated[1]).total() <= kills                    # those that were under way

# Killed ------------------------------------------------------------------------------------------------------------------------

def kill(here, stage, delay, number, *argv):
    "Start or resume the job, end it with signal `number` a `delay` after `stage` has begun; the stage it was in, or `None` if it was over"
    old,i = log(here),stages.index(stage)
    begun = rf'INFO {stages[i-1]}(  |: done)' if i else 'INFO kshot_search'
    with started(here, *small, *argv, *(['--resume'] if old else [])) as proc:
        while proc.is_alive() and not re.search(begun, log(here)[len(old):]): time.sleep(0.005)
        proc.join(delay)
        if proc.is_alive(): os.kill(proc.pid, number)
        proc.join(300)
    if 'INFO report  ' in log(here): return None
    assert proc.exitcode == (-number if number == signal.SIGKILL else 128+number)
    assert words(here)[1] == {signal.SIGKILL: '', signal.SIGINT: again.format('interrupted'), signal.SIGTERM: again.format('terminated')}[number]
    return next(s for s in stages if not re.search(rf'INFO {s}  ', log(here)))

signals = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]

def test_killed_three_times(whole, seconds, tmp_path):
    rng = random.Random()
    for stage,number in zip(sorted(rng.sample(stages, 3), key=stages.index), rng.sample(signals, 3)): kill(tmp_path, stage, rng.uniform(0, seconds[stage]), number)
    code,_,err = run(tmp_path, *small, '--resume')
    assert (code, err) == (0, ''), err
    same(tmp_path, whole)
    nothing_twice(tmp_path, whole, kills=3)

@pytest.mark.slow
def test_killed_in_every_stage_by_every_signal(whole, seconds, tmp_path):
    rng,left,hit = random.Random(),Counter({(stage, number):1 for stage in stages for number in signals}),[]
    for chain in range(12):
        plan = [(stage, rng.choice([n for s,n in left if s == stage] or signals)) for stage in stages]
        here = tmp_path/f'{chain}'
        here.mkdir()
        landed = [(hit_in, number) for stage,number in plan if (hit_in := kill(here, stage, rng.uniform(0, seconds[stage]), number))]
        code,_,err = run(here, *small, '--resume')
        assert (code, err) == (0, ''), err
        same(here, whole)
        nothing_twice(here, whole, kills=5)
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
def test_killed_after_every_publication(whole, tmp_path):
    assert run(tmp_path/'first', *small, hook=copy_at_publications)[::2] == (0, '')
    copies = sorted(tmp_path.glob('copy*'), key=lambda p: int(p.name[4:]))
    assert len(copies) > 20
    for here in copies:
        assert run(here, *small, '--resume')[::2] == (0, ''), here
        same(here, whole)
        nothing_twice(here, whole, kills=1)

@pytest.mark.slow
def test_killed_while_others_evaluate(whole, tmp_path):
    kill(tmp_path, 'search', 0., signal.SIGKILL)
    for number in signals: kill(tmp_path, 'search', random.uniform(2, 8), number, '--workers', 2)
    code,_,err = run(tmp_path, *small, '--resume')
    assert (code, err) == (0, ''), err
    same(tmp_path, whole)

# Two at once, and the clock -----------------------------------------------------------------------------------------------------

def test_two_at_once(whole, tmp_path):
    with started(tmp_path, *small) as proc:
        while 'epoch 1/4' not in log(tmp_path) and proc.is_alive(): time.sleep(0.005)
        os.kill(proc.pid, signal.SIGSTOP)
        before = {p:p.stat().st_mtime_ns for p in (tmp_path/'runs/digits').rglob('*')}
        code,_,err = run(tmp_path/'other', *small, '--out', tmp_path/'runs/digits')
        assert code == 2 and err == f"kshot_search: another kshot_search is at work in {tmp_path/'runs/digits'}: wait for it, stop it, or use another --out\n"
        assert {p:p.stat().st_mtime_ns for p in (tmp_path/'runs/digits').rglob('*')} == before
        os.kill(proc.pid, signal.SIGCONT)
        proc.join(300)
        assert proc.exitcode == 0
    same(tmp_path, whole)

def jumping_clock():
    "A clock that is off by up to a year, always by another amount, and progress bars, which look at it"
    real,rng,year = time.time,random.Random(0),365*24*3600
    time.time = lambda: real() + rng.uniform(-year, year)
    time.time_ns = lambda: int(1e9*time.time())                                     # what Python 3.13 puts into logs
    sys.stdout.isatty = lambda: True

def test_clock_that_jumps(whole, tmp_path):
    code,out,err = run(tmp_path, *small, hook=jumping_clock)
    assert (code, err) == (0, '') and '█' in out, err
    same(tmp_path, whole)
    day = [int(o[:10].replace('-', '')) for o in log(tmp_path).splitlines() if ' INFO ' in o]
    assert day != sorted(day), 'the clock has not jumped'
    for p in (tmp_path/'runs/digits').rglob('*'): os.utime(p, (2**31, 2**31) if 'epoch_00003' in p.name else (0, 0))    # the times of files say nothing, either
    for name in 'results.csv', 'training.csv': (tmp_path/'runs/digits'/name).unlink()
    assert run(tmp_path, *small, hook=jumping_clock)[::2] == (0, '')
    same(tmp_path, whole)
    nothing_twice(tmp_path, whole, kills=0)

# No room, no permission --------------------------------------------------------------------------------------------------------

def die_after(count):
    "End this process, as SIGKILL does, when it has given `count` files their names"
    real,number = os.replace,itertools.count(1)
    def replace(*args):
        real(*args)
        if next(number) == count: os.kill(os.getpid(), signal.SIGKILL)
    os.replace = replace

def advance(here, count=1, argv=small):
    "Start or resume a run, and let it write `count` files"
    assert run(here, *argv, hook=die_after, args=(count,))[0] == -signal.SIGKILL

def test_full_disk(whole, disk, tmp_path):
    (tmp_path/'runs').symlink_to(disk)
    for count in 2,7,9:                                                             # files to write before: stops in training, search and retraining
        advance(tmp_path, count)
        (disk/'ballast').write_bytes(b'0'*shutil.disk_usage(disk).free)
        code,_,err = run(tmp_path, *small, '--resume')
        assert code == 1 and err.count('\n') == 1 and ('No space left on device' in err or 'disk is full' in err or 'disk I/O error' in err), err
        (disk/'ballast').unlink()
    assert run(tmp_path, *small, '--resume')[::2] == (0, '')
    same(tmp_path, whole)
    nothing_twice(tmp_path, whole, kills=6)

def limit(size): resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def test_files_that_may_not_grow(whole, tmp_path):
    "Where no disk can be mounted: a limit on the size of files"
    advance(tmp_path)
    code,_,err = run(tmp_path, *small, hook=limit, args=(60_000,))
    assert code == 1 and err.count('\n') == 1 and 'File too large' in err, err
    assert run(tmp_path, *small)[::2] == (0, '')
    same(tmp_path, whole)

@contextmanager
def read_only(path):
    "Let nobody write to a file or folder"
    if os.geteuid(): path.chmod(0o555 if path.is_dir() else 0o444)
    else:                                                                           # whom permissions don't stop
        if subprocess.run(['mount', '--bind', path, path], capture_output=True).returncode: pytest.skip('nothing can be made read-only here')
        subprocess.run(['mount', '-o', 'remount,bind,ro', path], check=True)
    try: yield
    finally: path.chmod(0o755) if os.geteuid() else subprocess.run(['umount', path], check=True)

def test_read_only(whole, copy):
    folder = copy/'runs/digits'
    for name in 'results.csv', 'training.csv': (folder/name).unlink()
    for what,code,why in ('', 2, "can't be written to"),('log.txt', 2, 'Permission denied|Read-only'),('checkpoints', 1, 'Permission denied|Read-only'),('archive.sqlite', 1, 'Allow writing'):
        with read_only(folder/what): *res,err = run(copy, *small)
        assert res[0] == code and err.count('\n') == 1 and str(Path('runs/digits')/what) in err and re.search(why, err), err
    assert run(copy, *small)[::2] == (0, '')
    same(copy, whole)

# Images that go away -------------------------------------------------------------------------------------------------------------

pets = '--data pets --size 8 --bs 8 --k 2 --epochs 3 --pop 4 --gens 2 --retrain-epochs 1'.split()

@pytest.fixture
def images(tmp_path):
    "A folder with a folder of images that show nothing"
    rng = np.random.default_rng(0)
    for c in 'cat', 'dog':
        (tmp_path/'pets'/c).mkdir(parents=True)
        for i in range(12): Image.fromarray(rng.integers(0, 255, (8,8,3), dtype=np.uint8)).save(tmp_path/'pets'/c/f'{i}.png')
    return tmp_path

def move_away(what, epoch):
    "Rename the folder of images after an epoch"
    from kshot_nas.app.run import Follow
    real = Follow.after_epoch
    def after_epoch(self):
        real(self)
        if (self.what, self.epoch) == (what, epoch): os.rename('pets', 'gone')
    Follow.after_epoch = after_epoch

def test_images_that_go_away(images):
    advance(images, argv=pets)
    (images/'pets').rename(images/'gone')
    code,_,err = run(images, *pets, '--resume')
    assert code == 2 and err == f"kshot_search: there is no folder {images/'pets'}: give a folder of images, with a folder for each class\n"
    (images/'gone').rename(images/'pets')
    (images/'pets/cat/3.png').rename(images/'3.png')
    code,_,err = run(images, *pets, '--resume')
    assert code == 2 and err.count('\n') == 1 and 'the images of pets are not those that the run' in err
    (images/'3.png').rename(images/'pets/cat/3.png')
    for what,epoch in ('supernet', 1),('winner 1', 0):
        code,_,err = run(images, *pets, '--resume', hook=move_away, args=(what, epoch))
        assert code == 1 and err.count('\n') == 1 and 'FileNotFoundError' in err and str(Path('runs/pets/log.txt')) in err, err
        (images/'gone').rename(images/'pets')
    assert run(images, *pets, '--resume')[::2] == (0, '')
    (images/'runs/pets').rename(images/'runs/robbed')
    assert run(images, *pets)[::2] == (0, '')
    for name in names: assert (images/'runs/robbed'/name).read_bytes() == (images/'runs/pets'/name).read_bytes(), name

# Damaged files -------------------------------------------------------------------------------------------------------------------

def truncated(data): return data[:len(data)//2]
def flipped(data): return data[:(i := random.randrange(len(data)*9//10))] + bytes([data[i] ^ 1 << random.randrange(8)]) + data[i+1:]      # config.json ends with its digest
def foreign(data): return b'Remember the milk.\n'*99
def empty(data): return b''
def spoil(path, damage): path.write_bytes(damage(path.read_bytes()))
damages = truncated, flipped, foreign, empty

@pytest.mark.parametrize('damage', damages, ids=lambda f: f.__name__)
def test_damaged_files_are_made_anew(damage, whole, copy):
    for name in 'training.csv', 'codes.npy', 'results.csv', 'best.json', 'model.pt': spoil(copy/'runs/digits'/name, damage)
    assert run(copy, *small, '--resume')[::2] == (0, '')
    same(copy, whole)
    nothing_twice(copy, whole, kills=0)

def test_damaged_note_of_what_was_written(whole, copy):
    spoil(copy/'runs/digits/checkpoints/written.json', random.choice(damages))
    assert run(copy, *small, '--resume')[::2] == (0, '')
    same(copy, whole)

@pytest.mark.parametrize('damage', damages, ids=lambda f: f.__name__)
def test_damaged_config_is_refused(damage, whole, copy, monkeypatch, capsys):
    monkeypatch.chdir(copy)
    file = copy/'runs/digits/config.json'
    spoil(file, damage)
    before = {p:p.stat().st_mtime_ns for p in file.parent.rglob('*')}
    for argv in ['--resume', '--out', 'runs/digits'],small:
        code,(out,err) = main(argv),capsys.readouterr()
        assert (code, out, err.count('\n')) == (2, '', 1) and "config.json can't be read, was changed, or was not written by kshot_search: restore it, or use another --out" in err, file.read_bytes()
    assert {p:p.stat().st_mtime_ns for p in file.parent.rglob('*')} == before

@pytest.mark.parametrize('damage', [truncated, foreign], ids=lambda f: f.__name__)
def test_damaged_archive_is_told_of(damage, whole, copy):
    archive = copy/'runs/digits/archive.sqlite'
    (copy/'runs/digits/results.csv').unlink()
    spoil(archive, damage)
    code,_,err = run(copy, *small, '--resume')
    assert code == 1 and err.count('\n') == 1 and 'archive.sqlite cannot be used' in err and re.search('It is damaged|It is no archive', err), err
    archive.unlink()                                                                # as it says
    assert run(copy, *small, '--resume')[::2] == (0, '')
    same(copy, whole)

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
    assert run(tmp_path, *small, hook=break_an_operation)[::2] == (0, '')
    rows = pd.read_csv(tmp_path/'runs/digits/results.csv')
    broken,search = rows.arch.str.contains('-2_'),rows.stage == 'search'
    assert (rows.failure[broken & search] == 'lines').all() and (broken & search).any() and not (broken & (rows.stage == 'rank')).any()
    assert rows.failure[~broken].isna().all() and rows.accuracy[~broken].notna().all()
    assert not json.loads((tmp_path/'runs/digits/best.json').read_text())['ops'][-1] == 'conv1'
