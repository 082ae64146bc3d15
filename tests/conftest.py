import os
import random
import subprocess

import pytest
import torch

seed = int(os.environ.get('KSHOT_TEST_SEED', random.randrange(10**6)))

def pytest_report_header(): return f'kills and damages are drawn with the seed {seed}: KSHOT_TEST_SEED={seed} repeats them'

@pytest.fixture(autouse=True)
def rng(request):
    "Decides when a process is killed and which byte is damaged; each test has its own, so that it can be run alone"
    random.seed(f'{seed} {request.node.name}')
    return random.Random(f'{seed} {request.node.name}')

@pytest.fixture(scope='module')
def one_thread():
    "Several would only wait for each other on networks as small as these"
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)

@pytest.fixture
def disk(tmp_path):
    "A folder on a disk of its own with room for 32 MB, if this user may mount one"
    folder = tmp_path/'disk'
    folder.mkdir()
    if subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=32m', 'tmpfs', folder], capture_output=True).returncode: pytest.skip('a small disk cannot be mounted here')
    yield folder
    subprocess.run(['umount', '-l', folder], check=True)
