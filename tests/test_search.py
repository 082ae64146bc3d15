"Searches that are killed, share an archive, run out of disk, may not write, find it damaged, or have others do the work."
import os
import resource
import shutil
import signal
import time
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import joblib
import pytest
import torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.losses import CrossEntropyLossFlat
from sklearn.datasets import load_digits

from kshot_nas.archive import Archive, read_archive
from kshot_nas.cost import CostTable
from kshot_nas.finalists import Trainings
from kshot_nas.learner import kshot_learner
from kshot_nas.problem import ArchProblem, landscape
from kshot_nas.search import search
from kshot_nas.tiny import tiny_supernet

pytestmark = pytest.mark.usefixtures('one_thread')

net   = tiny_supernet(k=1)
space = net.space
table = CostTable(net)
acc   = landscape(space)
quiet = partial(search, max_flops=200e3, pop=20, parents=8, gens=10, progress=False)

@pytest.fixture(scope='module')
def straight():
    "The history of a search that nothing happened to"
    history = quiet(ArchProblem(space, acc, table)).history
    assert len(history) == 200
    return history

class Noted:
    "An evaluator that appends what it evaluates to a file, and takes its time"
    def __init__(self, log, seconds=0.): self.log,self.seconds = log,seconds
    def __call__(self, arch):
        with open(self.log, 'a') as f: f.write(f'{arch}\n')
        time.sleep(self.seconds)
        return acc(arch)

def noted(log): return log.read_text().split()

def run(archive, log, seconds, seed=0):
    torch.set_num_threads(1)
    quiet(ArchProblem(space, Noted(log, seconds), table), archive=archive, seed=seed)

@contextmanager
def process(target, *args):
    proc = get_context('fork').Process(target=target, args=args, daemon=True)
    proc.start()
    try: yield proc
    finally: proc.kill(); proc.join()

# Killed ----------------------------------------------------------------------------------------------------------------------

def test_killed_and_resumed(straight, tmp_path, rng):
    archive,log,lost = tmp_path/'a.db',tmp_path/'log',0
    log.touch()
    for n in (7, 20, 41, 90, 150):                                                  # in the first generation, at its end, and later
        with process(run, archive, log, 0.002) as proc:
            while len(noted(log)) < n + lost and proc.is_alive(): time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.004))
            proc.kill(); proc.join()
            assert proc.exitcode == -signal.SIGKILL, 'it was over before it could be killed'
        held = read_archive(archive).arch.tolist()
        assert held == straight.arch[:len(held)].tolist()
        lost = len(noted(log)) - len(held)                                          # killed before their results could be written
        assert len(held) >= n-1 and 0 <= lost <= 5
    with process(run, archive, log, 0.) as proc:
        proc.join()
        assert proc.exitcode == 0
    log2 = tmp_path/'log2'; log2.touch()
    again = quiet(ArchProblem(space, Noted(log2), table), archive=archive)
    assert again.history.equals(straight) and not noted(log2)                       # all of it comes from the archive
    assert len(noted(log)) == 200 + lost and set(noted(log)) == {str(a) for a in straight.arch}
    assert read_archive(archive).arch.is_unique

def test_two_writers(straight, tmp_path):
    archive,logs = tmp_path/'a.db',[tmp_path/'log0', tmp_path/'log1']
    with process(run, archive, logs[0], 0.001, 0) as one, process(run, archive, logs[1], 0.001, 1) as two:
        one.join(); two.join()
        assert one.exitcode == two.exitcode == 0
    held = read_archive(archive)
    assert held.arch.is_unique and set(map(str, held.arch)) == {*noted(logs[0]), *noted(logs[1])}
    assert held.accuracy.tolist() == [acc(a) for a in held.arch] and set(held.seed) == {0, 1}
    assert quiet(ArchProblem(space, acc, table), archive=archive).history.equals(straight)

# No room, no permission ------------------------------------------------------------------------------------------------------

def fails_and_goes_on(archive, straight, make_room, message):
    with pytest.raises(OSError, match=message) as e: quiet(ArchProblem(space, acc, table), archive=archive)
    found = e.value.result.history
    assert str(archive) in str(e.value) and 0 < len(found) < 200 and found.equals(straight[:len(found)])
    make_room()
    held = read_archive(archive).arch.tolist()
    assert held == found.arch.tolist()                                              # nothing that was found is lost
    assert quiet(ArchProblem(space, acc, table), archive=archive).history.equals(straight)

def test_full_disk(straight, disk):
    ballast = disk/'ballast'
    ballast.write_bytes(b'0'*(shutil.disk_usage(disk).free-92*1024))
    fails_and_goes_on(disk/'a.db', straight, ballast.unlink, 'disk is full.*Nothing that it holds is lost: make room|disk I/O error.*is there room')

def test_file_too_large(straight, tmp_path):
    "Where no disk can be mounted: a limit on the size of files"
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, old[1]))
    def make_room(): resource.setrlimit(resource.RLIMIT_FSIZE, old)
    try: fails_and_goes_on(tmp_path/'a.db', straight, make_room, 'disk is full|disk I/O error')
    finally: make_room()

@pytest.mark.parametrize('folder_mode', [0o755, 0o777], ids=['folder read-only', 'folder writable'])
def test_read_only(tmp_path, folder_mode):
    folder,nobody = tmp_path/'folder',65534
    folder.mkdir()
    archive = folder/'a.db'
    quiet(ArchProblem(space, acc, table), archive=archive, gens=2)
    before = archive.read_bytes()
    def use(conn):
        if os.geteuid() == 0: os.setuid(nobody)                                     # for root nothing is read-only
        try: Archive(archive, space)
        except OSError as e: conn.send(str(e))
        else: conn.send('opened')
    archive.chmod(0o444)
    if os.geteuid(): folder.chmod(0o555 if folder_mode == 0o755 else 0o755)
    else:
        folder.chmod(folder_mode)
        for p in tmp_path,tmp_path.parent,tmp_path.parent.parent: p.chmod(0o755)    # so that nobody gets as far as this
    ours,theirs = get_context('fork').Pipe(duplex=False)
    with process(use, theirs):
        assert ours.poll(20)
        told = ours.recv()
    folder.chmod(0o755)
    assert 'a.db cannot be used: ' in told and 'Allow writing to it and to its folder' in told
    assert archive.read_bytes() == before and len(read_archive(archive)) == 40

# Images that are gone, and damaged archives ----------------------------------------------------------------------------------

def test_images_are_gone_for_a_while(straight, tmp_path):
    calls = []
    def robbed(arch):
        calls.append(arch)
        if len(calls) == 30: raise FileNotFoundError('no such file: cat.jpg')
        return acc(arch)
    problem = ArchProblem(space, robbed, table)
    with pytest.raises(FileNotFoundError, match='cat.jpg') as e: quiet(problem, archive=tmp_path/'a.db')
    assert e.value.result.history.equals(straight[:29])
    assert quiet(problem, archive=tmp_path/'a.db').history.equals(straight)         # nothing is held against an architecture
    assert len(calls) == 201

def damaged(data, rng):
    "Truncated, with a bit flipped, or with a stretch of something else"
    i,kind = rng.randrange(len(data)),rng.choice(['truncated', 'flipped', 'foreign'])
    if kind == 'truncated': return kind,data[:i]
    if kind == 'flipped': return kind,data[:i] + bytes([data[i] ^ 1 << rng.randrange(8)]) + data[i+1:]
    return kind,data[:i] + rng.randbytes(n := min(rng.choice((8, 100, 4096)), len(data)-i)) + data[i+n:]

@pytest.mark.parametrize('n', [20, pytest.param(500, marks=pytest.mark.slow)])
def test_damaged_archive(straight, tmp_path, rng, n):
    "It is told of, or makes no difference"
    quiet(ArchProblem(space, acc, table), archive=tmp_path/'good.db', gens=4)
    data,told,read = (tmp_path/'good.db').read_bytes(),0,0
    for i in range(n):
        (tmp_path/'a.db').write_bytes((bad := damaged(data, rng))[1])
        try: assert quiet(ArchProblem(space, acc, table), archive=tmp_path/'a.db', gens=4).history.equals(straight[:80]), bad
        except (OSError, ValueError) as e:
            told += 1
            assert str(e).count(str(tmp_path/'a.db')) == 1 and ('archive' in str(e) or 'another program' in str(e)), (e, bad)
        for name in 'a.db-wal', 'a.db-shm': (tmp_path/name).unlink(missing_ok=True)
        (tmp_path/'a.db').write_bytes(bad[1])
        try: held = read_archive(tmp_path/'a.db')
        except (OSError, ValueError) as e: assert str(tmp_path/'a.db') in str(e), (e, bad)
        else:
            assert held.arch.tolist() == straight.arch[:80].tolist() and held.accuracy.tolist() == straight.accuracy[:80].tolist(), bad
            read += 1
        for name in 'a.db-wal', 'a.db-shm': (tmp_path/name).unlink(missing_ok=True)
    assert n//4 < told < n and 0 < read < n

# Others do the work ----------------------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def learn():
    x,y = load_digits(return_X_y=True)
    x,y = torch.tensor(x).float().view(-1,1,8,8)/8-1,torch.tensor(y)
    dls = DataLoaders.from_dsets(*([(a,b) for a,b in zip(x[s], y[s])] for s in (slice(64), slice(64, 128))), bs=32, num_workers=0, device='cpu', drop_last=False)
    dls.c = 10
    return kshot_learner(dls, tiny_supernet, k=2, widths=True, nf=4, warmup=0, loss_func=CrossEntropyLossFlat())

few = dict(pop=12, parents=6, gens=3, metric='loss', progress=False)

def test_workers_agree(learn, tmp_path):
    one = learn.search(**few).history
    assert len(one) == 36 and one.loss.nunique() > 30
    two = learn.search(workers=2, archive=tmp_path/'a.db', **few).history
    assert two.equals(one)                                                          # to the last bit
    assert sorted(map(str, read_archive(tmp_path/'a.db').arch)) == sorted(map(str, one.arch))

def test_learner_knows_the_best(learn):
    result = learn.search(**few)
    assert learn.best_arch == result.best and result.history.loss.min() == learn.eval_arch(learn.best_arch)['loss']

def test_unknown_metric_is_refused_before_anything_is_evaluated(learn, monkeypatch):
    def untouched(*args, **kwargs): raise AssertionError('evaluated!')
    monkeypatch.setattr(type(learn), 'eval_arch', untouched)
    with pytest.raises(ValueError, match="metric must be one of 'loss', 'accuracy'; got 'f1_score'"):
        learn.search(metric='f1_score')
    with pytest.raises(ValueError, match="should 'wow' be large or small.*maximize=True"):
        ArchProblem(space, untouched, table, metric='wow')

def test_bar(capsys):
    search(ArchProblem(space, acc, table), max_flops=200e3, pop=20, parents=8, gens=3)
    assert 'best accuracy 0.8' in capsys.readouterr().out

class Patient:
    "An evaluator that takes its time over `first`: until nine others are in the archive"
    def __init__(self, archive, first): self.archive,self.first = archive,first
    def __call__(self, arch):
        end = time.monotonic() + 60
        while arch == self.first and len(read_archive(self.archive)) < 9:
            if time.monotonic() > end: raise TimeoutError('nobody else has a result')
            time.sleep(0.05)
        return acc(arch)

def test_results_do_not_wait_for_a_slow_one(straight, tmp_path):
    problem = ArchProblem(space, Patient(tmp_path/'a.db', straight.arch[0]), table)
    assert quiet(problem, workers=2, archive=tmp_path/'a.db', gens=1).history.equals(straight[:20])
    assert read_archive(tmp_path/'a.db').arch.tolist().index(straight.arch[0]) >= 9

class Mortal(Noted):
    "An evaluator that ends the process that uses it, the first time that it sees `last`"
    def __init__(self, log, last): super().__init__(log); self.last = last
    def __call__(self, arch):
        if arch == self.last and str(arch) not in noted(self.log):
            super().__call__(arch)
            os._exit(1)
        return super().__call__(arch)

def test_worker_dies(straight, tmp_path):
    archive,log,last = tmp_path/'a.db',tmp_path/'log',straight.arch[47]             # in the midst of the third generation
    log.touch()
    problem = ArchProblem(space, Mortal(log, last), table)
    with pytest.raises(Exception) as e: quiet(problem, workers=2, archive=archive)
    assert 'worker' in str(e.value).lower() or 'process' in str(e.value).lower()
    found,held = e.value.result,read_archive(archive)
    assert found.interrupted and found.history.equals(straight[:len(found.history)]) and 40 <= len(found.history) < 48
    assert held.accuracy.tolist() == [acc(a) for a in held.arch] and last not in set(held.arch)
    before = noted(log)
    assert quiet(problem, archive=archive).history.equals(straight)
    assert not set(noted(log)[len(before):]) & set(map(str, held.arch))             # what was done is not done again

def test_dask(learn):
    distributed = pytest.importorskip('distributed')
    one = learn.search(**few).history
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, host='127.0.0.1', dashboard_address=None) as cluster, distributed.Client(cluster) as client:
        with joblib.parallel_config(backend='dask'): two = learn.search(**few).history
        def unpacked():
            import threading
            return sum(hasattr(t, 'kshot_key') for t in threading.enumerate())
        assert two.equals(one)
        assert client.run(unpacked) and max(client.run(unpacked).values()) == 1     # the supernet came once

def test_the_last_dask_worker_dies(straight, tmp_path):
    "The evaluator dies with it, and Dask cancels all that needs it"
    distributed = pytest.importorskip('distributed')
    log = tmp_path/'log'
    log.touch()
    problem = ArchProblem(space, Mortal(log, straight.arch[47]), table)
    with distributed.LocalCluster(n_workers=1, threads_per_worker=2, host='127.0.0.1', dashboard_address=None) as cluster, distributed.Client(cluster):
        with joblib.parallel_config(backend='dask'): assert quiet(problem).history.equals(straight)
    assert noted(log).count(str(straight.arch[47])) == 2

class Working(Noted):
    "An evaluator that notes who works"
    def __call__(self, arch):
        with open(self.log, 'a') as f: f.write(f'{os.getpid()}\n')
        time.sleep(self.seconds)
        return acc(arch)

def in_a_search(log): quiet(ArchProblem(space, Working(log, 0.1), table), workers=2)

class NoteWho(Callback):
    "Notes who trains"
    def __init__(self, log): self.log = log
    def after_batch(self): Working(self.log, 0.05)(space.sample(1, seed=0)[0])

def in_the_finals(log):
    data = [(torch.zeros(1,8,8), i % 10) for i in range(20)]
    dls = DataLoaders.from_dsets(data, data, bs=4, num_workers=0, device='cpu')
    Trainings(dls, net.subnet, log.parent/'alone', workers=2, cbs=NoteWho(log)).curves(space.sample(4, seed=0), 1000)

def alive(pid):
    "Is there such a process, and has it not ended?"
    try: return Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()[0] != 'Z'   # Z: nobody has asked how it ended
    except OSError: return False

@pytest.mark.skipif(not os.path.exists('/proc/self/stat'), reason='this system does not tell whether a process has ended')
@pytest.mark.parametrize('employ', [in_a_search, in_the_finals], ids=lambda f: f.__name__)
def test_workers_end_with_their_parent(employ, tmp_path):
    log = tmp_path/'log'
    log.touch()
    proc = get_context('spawn').Process(target=employ, args=(log,))                 # a daemon may have no workers
    proc.start()
    try:
        while len(set(noted(log))) < 2 and proc.is_alive(): time.sleep(0.05)
        assert proc.is_alive()
    finally: proc.kill(); proc.join()
    workers,end = {int(pid) for pid in noted(log)},time.monotonic() + 20
    while any(map(alive, workers)) and time.monotonic() < end: time.sleep(0.1)
    left = [pid for pid in workers if alive(pid)]
    for pid in left: os.kill(pid, signal.SIGKILL)
    assert not left, 'they live on'

def employ_and_end(): quiet(ArchProblem(space, acc, table), workers=2, gens=2)

def test_nobody_waits_for_idle_workers():
    "joblib keeps processes for five minutes, and a process of multiprocessing waits for those that it has started"
    proc = get_context('spawn').Process(target=employ_and_end)
    proc.start()
    try: proc.join(200)
    finally: code,_ = proc.exitcode,proc.kill()
    assert code == 0

# For long: memory must not grow, and pace must not drop -----------------------------------------------------------------------

import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402

from kshot_nas.rank import rank_report  # noqa: E402
from kshot_nas.result import SearchResult  # noqa: E402

def kilobytes():
    "Memory that this process has now"
    with open('/proc/self/status') as f: return next(int(line.split()[1]) for line in f if line.startswith('VmRSS'))

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
    result = search(ArchProblem(net.space, evaluate, CostTable(net)), max_flops=200e3, gens=gens, archive=archive, progress=False)
    assert len(result.history) == count == 50*gens
    return marks

@pytest.mark.skipif(not os.path.exists('/proc/self/status'), reason='this system does not tell how much memory a process has')
@pytest.mark.parametrize('gens', [60, pytest.param(400, marks=pytest.mark.slow)])
def test_a_long_search_stays_small_and_quick(gens, tmp_path):
    "In a process of its own, where nothing that others have freed can be used again"
    with get_context('spawn').Pool(1) as pool: marks = pool.apply(long_search, (gens, tmp_path/'a.db'))
    memory,seconds = np.array(marks).T
    assert memory[-1] < 1.1*memory[20] and memory[-1]-memory[20] < 2*50*(gens-20), 'more than 2 kB for an evaluation'
    pace = np.diff(seconds)
    assert np.median(pace[-20:]) < 3*np.median(pace[20:40]), 'generations take longer and longer'
    assert (tmp_path/'a.db').stat().st_size < 500*50*gens

def test_pictures_of_many_points():
    net,rng,n = tiny_supernet(k=1, widths=True),np.random.default_rng(0),50_000
    table,accuracy = CostTable(net),landscape(net.space)
    archs = list(dict.fromkeys(net.space.sample(2*n, seed=0)))[:n]
    costs = dict(flops=table.flops(archs), params=table.params(archs))
    seen = pd.DataFrame(dict(arch=archs, **costs, accuracy=[accuracy(a) for a in archs], generation=np.arange(n)//50))
    result,report = SearchResult(net.space, seen),rank_report(seen.accuracy, rng.normal(seen.accuracy, 0.01), n_boot=0)
    for plot in result.plot_pareto, result.plot_history, report.plot_scatter, report.plot_high:
        start = time.process_time()
        plot().figure.canvas.draw()
        assert time.process_time()-start < 10
