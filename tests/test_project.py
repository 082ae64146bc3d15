"What keeps the notebooks, the package and the README one thing. What the library does is tested in the notebooks themselves."
import ast
import filecmp
import importlib
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

root = Path(__file__).resolve().parents[1]
nbs  = sorted((root/'nbs').rglob('*.ipynb'))
ini  = ConfigParser(delimiters=['='])
ini.read(root/'settings.ini', encoding='utf-8')
cfg  = ini['DEFAULT']
needs_nbdev = pytest.mark.skipif(importlib.util.find_spec('nbdev') is None, reason='nbdev is not installed in this environment')

def load(nb): return json.loads(nb.read_text(encoding='utf-8'))
def code(nb): return [''.join(c['source']) for c in load(nb)['cells'] if c['cell_type'] == 'code']
def module(nb):
    "The name of the module that `nb` exports, or None"
    found = [m[1] for s in code(nb) if (m := re.match(r'#\|\s*default_exp\s+(\S+)', s))]
    return found[0] if found else None

modules = {module(nb): nb for nb in nbs if module(nb)}

def run(*args, cwd, **env):
    return subprocess.run([str(a) for a in args], cwd=cwd, capture_output=True, text=True, env={**os.environ, **env})

def tool(name): return Path(sys.executable).with_name(name)

def copy_project(dest):
    "The part of the project that nbdev works on, copied to `dest`"
    for d in ('nbs', 'kshot_nas'): shutil.copytree(root/d, dest/d, symlinks=True, ignore=shutil.ignore_patterns('__pycache__'))
    for f in ('settings.ini', '_quarto.yml', 'pyproject.toml'): shutil.copy(root/f, dest)
    return dest

@needs_nbdev
def test_every_notebook_is_run(monkeypatch):
    "nbdev_test exits 0 when it finds nothing to run or is told to skip, so look at what it finds."
    monkeypatch.chdir(root)
    from nbdev.doclinks import nbglob
    found = {Path(p).resolve() for p in nbglob()}
    assert found == {nb.resolve() for nb in nbs} and modules, 'nbdev_test would pass over notebooks under nbs/'
    assert not list((root/'nbs').rglob('.notest'))
    for nb in nbs:
        text = '\n'.join(''.join(c['source']) for c in load(nb)['cells'])
        assert 'skip_exec' not in text and 'eval: false' not in text.lower(), f'{nb.name} has parts that are never run'

@needs_nbdev
def test_a_failing_cell_fails_the_run(tmp_path):
    proj = copy_project(tmp_path)
    nb = proj/'nbs/index.ipynb'
    d = load(nb)
    d['cells'].append(dict(cell_type='code', execution_count=None, id='deadbeef', metadata={}, outputs=[], source='assert 1 == 2'))
    nb.write_text(json.dumps(d))
    res = run(tool('nbdev_test'), '--path', nb, cwd=proj)
    assert res.returncode != 0 and 'index.ipynb' in res.stderr, res.stdout + res.stderr

@needs_nbdev
def test_package_is_what_the_notebooks_export(tmp_path):
    proj = copy_project(tmp_path)
    res = run(tool('nbdev_export'), cwd=proj)
    assert res.returncode == 0, res.stderr
    names = {p.name for p in (root/'kshot_nas').glob('*.py')} | {p.name for p in (proj/'kshot_nas').glob('*.py')}
    _,differ,missing = filecmp.cmpfiles(root/'kshot_nas', proj/'kshot_nas', names, shallow=False)
    assert not differ + missing, f'run nbdev_export: {differ + missing} differ from the notebooks'
    assert {p.stem for p in (root/'kshot_nas').glob('*.py')} == {*modules, '__init__', '_modidx'}, 'a module without a notebook'

@needs_nbdev
def test_notebooks_are_clean(tmp_path):
    proj = copy_project(tmp_path)
    res = run(tool('nbdev_clean'), cwd=proj)
    assert res.returncode == 0, res.stderr
    for nb in nbs:
        assert load(nb) == load(proj/nb.relative_to(root)), f'run nbdev_clean: {nb.name} carries what a run left behind'

@pytest.mark.parametrize('nb', nbs, ids=lambda nb: nb.stem)
def test_cells_and_outputs(nb):
    cells = load(nb)['cells']
    ids = [c['id'] for c in cells]
    assert len(set(ids)) == len(ids), 'two cells with one id'
    for c in cells:
        for out in c.get('outputs', []):
            assert out['output_type'] != 'error', out
            assert out.get('name') != 'stderr', f'a warning or a progress bar was stored: {out}'
            assert not re.search(r'/(home|root|work|tmp|Users)/', json.dumps({k:v for k,v in out.get('data', {}).items() if k != 'image/png'}) + str(out.get('text')))

def imported(source):
    "Names of the modules of this package that Python `source` imports"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module and node.module.startswith('kshot_nas'):
            parts = node.module.split('.')
            yield from ([parts[1]] if len(parts) > 1 else [a.name for a in node.names])
        elif isinstance(node, ast.ImportFrom) and node.level: yield (node.module or node.names[0].name).split('.')[0]
        elif isinstance(node, ast.Import): yield from (a.name.split('.')[1] for a in node.names if a.name.startswith('kshot_nas.'))

def test_imports_point_to_lower_numbers():
    number = {m: nb.name for m,nb in modules.items()}
    for mod in modules:
        for dep in imported((root/f'kshot_nas/{mod}.py').read_text()):
            assert dep in number and number[dep] < number[mod], f'{mod} (in {number[mod]}) imports {dep}'

def test_no_undefined_or_unused_names():
    "A name that a notebook has but its exported cells don't shows only here."
    pytest.importorskip('pyflakes')
    files = [p for d in ('kshot_nas', 'benchmarks', 'tools', 'tests') for p in sorted((root/d).glob('*.py'))]
    res = run(sys.executable, '-m', 'pyflakes', *files, cwd=root)
    assert res.returncode == 0, res.stdout

def public():
    "Functions and methods of the package by name, without those that take the types of a parent's method"
    for mod in map(importlib.import_module, (f'kshot_nas.{m}' for m in sorted(modules))):
        for name in mod.__all__:
            o = getattr(mod, name)
            if inspect.isfunction(o): yield f'{mod.__name__}.{name}',o
            for n,f in vars(o).items() if inspect.isclass(o) else ():
                ours = inspect.isfunction(f) and f.__module__.startswith('kshot_nas.') and not any(n in vars(c) for c in o.__mro__[1:])
                if n == '__init__' or (ours and not n.startswith('_')): yield f'{mod.__name__}.{name}.{n}',f

# What may be given in several forms, which the comment beside it tells.
any_form = set('path folder file dls supernet learn bench pred true seeds n_high lam archs params x o'.split())

def test_public_functions_have_types():
    "A parameter has a type, or a default that shows it, or takes several"
    params = [(name, p) for name,f in public() for p in inspect.signature(f).parameters.values() if p.kind < p.VAR_POSITIONAL and p.name != 'self']
    assert len(params) > 300
    bare = [f'{name}({p.name})' for name,p in params if p.default is p.empty and p.annotation is p.empty and p.name not in any_form]
    assert not bare, '\n'.join(bare)

def test_readme_is_the_index_notebook():
    spec = importlib.util.spec_from_file_location('readme', root/'tools/readme.py')
    readme = importlib.util.module_from_spec(spec); spec.loader.exec_module(readme)
    text,pictures = readme.render(load(root/'nbs/index.ipynb'))
    assert (root/'README.md').read_text(encoding='utf-8') == text, 'run make readme'
    for path,png in pictures.items(): assert (root/path).read_bytes() == png, f'run make readme: {path} is stale'
    for link in re.findall(r'\]\((nbs/[^)#]+)', text): assert (root/link).exists(), f'README links to {link}'

def test_site_lists_every_notebook():
    yaml = pytest.importorskip('yaml')
    assert (root/'nbs/_quarto.yml').is_symlink() and (root/'nbs/_quarto.yml').resolve() == root/'_quarto.yml'
    def names(o): return [o] if isinstance(o, str) else [n for v in (o.values() if isinstance(o, dict) else o) for n in names(v)]
    listed = [n for n in names(yaml.safe_load((root/'_quarto.yml').read_text())['website']['sidebar']['contents']) if n.endswith('.ipynb')]
    assert sorted(listed) == sorted(str(nb.relative_to(root/'nbs')) for nb in nbs)
    assert listed[0] == 'index.ipynb' and listed[1:] == sorted(listed[1:]), 'the sidebar is not in reading order'

def test_setup_needs_only_the_standard_library():
    tree = ast.parse((root/'setup.py').read_text())
    names = {a.name.split('.')[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module.split('.')[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert names - set(sys.stdlib_module_names) == {'setuptools'}

def test_wheel_works_elsewhere(tmp_path):
    "The package as a user gets it: built, installed into an empty folder, imported from another one."
    src,out,lib,elsewhere = (tmp_path/d for d in ('src', 'out', 'lib', 'elsewhere'))
    shutil.copytree(root, src, ignore=shutil.ignore_patterns('.git', '.venv*', '__pycache__', '*.egg-info', 'build', '_docs', '_proc', 'runs'), symlinks=True)
    elsewhere.mkdir()
    pip = [sys.executable, '-m', 'pip', '-q', '--disable-pip-version-check']
    res = run(*pip, 'wheel', '--no-deps', '--no-build-isolation', '-w', out, src, cwd=tmp_path)
    assert res.returncode == 0, res.stderr
    wheel, = out.glob('*.whl')
    with zipfile.ZipFile(wheel) as z: held,size = set(z.namelist()),sum(i.file_size for i in z.infolist())
    needed = {f'kshot_nas/{p.name}' for p in (root/'kshot_nas').iterdir() if p.suffix in ('.py', '.npz')}
    about = {f"kshot_nas-{cfg['version']}.dist-info/{n}" for n in ('METADATA', 'WHEEL', 'RECORD', 'entry_points.txt', 'top_level.txt', 'licenses/LICENSE')}
    assert held == needed | about and size < 10**6, (held ^ (needed | about), size)
    res = run(*pip, 'install', '--no-deps', '--target', lib, wheel, cwd=tmp_path)
    assert res.returncode == 0, res.stderr
    mods = ', '.join(f'kshot_nas.{m}' for m in sorted(modules))
    prog = f'import kshot_nas, {mods}; [kshot_nas.study.bench.DigitsBench(w) for w in (0, 1)]; print(kshot_nas.__version__, kshot_nas.__file__)'
    res = run(sys.executable, '-c', prog, cwd=elsewhere, PYTHONPATH=str(lib))
    assert res.returncode == 0, res.stderr
    version,file = res.stdout.split()
    assert version == cfg['version'] and Path(file).is_relative_to(lib)
