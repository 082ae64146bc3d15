"What keeps notebooks, package, sidebar and README one thing, and the package usable wherever it is installed."
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
import tarfile
import zipfile
from collections import Counter
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
def cells(nb, kind): return [''.join(c['source']) for c in load(nb)['cells'] if c['cell_type'] == kind]
def place(path): return path.relative_to(root/'nbs' if path.suffix == '.ipynb' else root).as_posix()
def number(nb): return int(nb.name.split('_')[0])

def module(nb):
    "The name of the module that `nb` exports, as `study.bench`, or None"
    names = [m[1] for s in cells(nb, 'code') if (m := re.match(r'#\|\s*default_exp\s+(\S+)', s))]
    return names[0] if names else None

def file_of(mod): return root/'kshot_nas'/f"{mod.replace('.', '/')}.py"

modules = {module(nb): nb for nb in nbs if module(nb)}
exported = [p for p in sorted((root/'kshot_nas').rglob('*.py')) if p.name != '_modidx.py']
sources  = [*exported, *(p for d in ('benchmarks', 'tools', 'tests') for p in sorted((root/d).glob('*.py')))]

def run(*args, cwd, **env):
    env = {k:v for k,v in {**os.environ, **env}.items() if v is not None}
    return subprocess.run([str(a) for a in args], cwd=cwd, capture_output=True, text=True, env=env)

def tool(name): return Path(sys.executable).with_name(name)

def listed(places):
    "Fail with a list of `places` if there are any"
    if places: pytest.fail('\n'.join(places), pytrace=False)

def copy_project(dest):
    "The part of the project that nbdev works on, copied to `dest`"
    for d in ('nbs', 'kshot_nas'): shutil.copytree(root/d, dest/d, symlinks=True, ignore=shutil.ignore_patterns('__pycache__'))
    for f in ('settings.ini', '_quarto.yml', 'pyproject.toml'): shutil.copy(root/f, dest)
    return dest

# Notebooks and package --------------------------------------------------------------------------------------------------------

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
    held = {place(p) for p in (root/'kshot_nas').rglob('*.py')} | {p.relative_to(proj).as_posix() for p in (proj/'kshot_nas').rglob('*.py')}
    _,differ,missing = filecmp.cmpfiles(root, proj, sorted(held), shallow=False)
    assert not differ + missing, f'run nbdev_export: {differ + missing} differ from the notebooks'
    made = {place(file_of(m)) for m in modules} | {f'kshot_nas/{d}__init__.py' for d in ('', 'study/', 'app/')} | {'kshot_nas/_modidx.py'}
    assert held == made, f'a module without a notebook, or the other way around: {held ^ made}'

@needs_nbdev
def test_notebooks_are_clean(tmp_path):
    proj = copy_project(tmp_path)
    res = run(tool('nbdev_clean'), cwd=proj)
    assert res.returncode == 0, res.stderr
    for nb in nbs:
        assert load(nb) == load(proj/nb.relative_to(root)), f'run nbdev_clean: {nb.name} carries what a run left behind'

@pytest.mark.parametrize('nb', nbs, ids=place)
def test_cells_and_outputs(nb):
    every = load(nb)['cells']
    ids = [c['id'] for c in every]
    assert len(set(ids)) == len(ids), 'two cells with one id'
    for out in (o for c in every for o in c.get('outputs', [])):
        assert out['output_type'] != 'error', out
        assert out.get('name') != 'stderr', f'a warning or a progress bar was stored: {out}'
        shown = json.dumps({k:v for k,v in out.get('data', {}).items() if k != 'image/png'}) + str(out.get('text'))
        assert not re.search(r'/(home|root|work|tmp|Users)/', shown), shown

def test_links_between_notebooks():
    links = [(nb, link) for nb in nbs for text in cells(nb, 'markdown') for link in re.findall(r'\]\((?!\w+:|#)([^)#\s]+)', text)]
    listed([f'{place(nb)} links to {link}, which is not there' for nb,link in links if not (nb.parent/link).exists()])
    listed([f'{place(nb)}: {m}' for nb in nbs for text in cells(nb, 'markdown') for m in re.findall(r'[Cc]hapters? \d+', text)])

# How the modules are laid out --------------------------------------------------------------------------------------------------

def imports(mod, source):
    "Modules of this package that Python `source` of the module `mod` imports, each with the names that it takes from there"
    package = ['kshot_nas', *mod.split('.')][:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import): yield from ((a.name.removeprefix('kshot_nas.'), []) for a in node.names if a.name.startswith('kshot_nas.'))
        if not isinstance(node, ast.ImportFrom): continue
        base = [*package[:len(package)+1-node.level]*(node.level > 0), *(node.module or '').split('.')]
        base,names = '.'.join(filter(None, base)),[a.name for a in node.names]
        if base.split('.')[0] != 'kshot_nas': continue
        inner = base.removeprefix('kshot_nas').lstrip('.')
        if inner in modules: yield inner,names
        else: yield from (('.'.join(filter(None, [inner, n])), []) for n in names)

def test_imports_are_found():
    code = 'import kshot_nas.rank\nfrom ..space import Arch, _x\nfrom .bench import build\nfrom kshot_nas import cost\nfrom .. import search\nfrom .. import study\nimport torch'
    got = dict(imports('study.new', code))
    assert got == {'rank': [], 'space': ['Arch', '_x'], 'study.bench': ['build'], 'cost': [], 'search': [], 'study': []}

def test_numbers_are_unique():
    taken = Counter(number(nb) for nb in nbs if nb.stem != 'index')
    listed([f'{place(nb)}: more than one notebook has this number' for nb in nbs if nb.stem != 'index' and taken[number(nb)] > 1])

def test_imports_point_to_lower_numbers():
    def fits(mod, dep): return dep in modules and number(modules[dep]) < number(modules[mod])
    deps = [(mod, dep) for mod in modules if file_of(mod).exists() for dep,_ in imports(mod, file_of(mod).read_text(encoding='utf-8'))]
    listed([f"{place(modules[m])} imports {d}, which {place(modules[d]) if d in modules else 'no notebook'} exports" for m,d in deps if not fits(m, d)])

def test_private_names_stay_where_they_are():
    "In the package, and in those cells of the notebooks that it is made of"
    code = [(place(file_of(m)), m, file_of(m).read_text(encoding='utf-8')) for m in modules if file_of(m).exists()]
    code += [(place(nb), m, s) for m,nb in modules.items() for s in cells(nb, 'code') if re.match(r'#\|\s*exports?\b', s)]
    listed([f'{where} imports {name} of {dep}' for where,m,s in code for dep,names in imports(m, s) for name in names if name.startswith('_') and name != '__version__'])

def test_exported_lines_are_short():
    "But for the list of names, which nbdev writes"
    def lines(p): return re.sub(r'^__all__ = \[.*?\]', lambda m: '\n'*m[0].count('\n'), p.read_text(encoding='utf-8'), flags=re.M | re.S).splitlines()
    listed([f'{place(p)}:{i}: {len(line)} columns' for p in exported for i,line in enumerate(lines(p), 1) if len(line) > 120])

def test_site_lists_every_notebook_in_order():
    "Each once, in the order of the numbers within a section; the start page comes first"
    yaml = pytest.importorskip('yaml')
    assert (root/'nbs/_quarto.yml').is_symlink() and (root/'nbs/_quarto.yml').resolve() == root/'_quarto.yml'
    first,*sections = yaml.safe_load((root/'_quarto.yml').read_text())['website']['sidebar']['contents']
    files = [[f for f in s['contents'] if f.endswith('.ipynb')] for s in sections]
    rest,there = sum(files, []),{place(nb) for nb in nbs}
    listed([f'{n} is not in the sidebar' for n in sorted(there - {first, *rest})] + [f'{n} is in the sidebar only' for n in {first, *rest} - there])
    assert first == 'index.ipynb' and len(set(rest)) == len(rest) == len({number(Path(n)) for n in rest})
    listed([f'{b} comes after {a} in the sidebar' for s in files for a,b in zip(s, s[1:]) if number(Path(a)) >= number(Path(b))])

def test_no_undefined_or_unused_names():
    "A name that a notebook has but its exported cells don't shows only here."
    pytest.importorskip('pyflakes')
    res = run(sys.executable, '-m', 'pyflakes', *sources, cwd=root)
    assert res.returncode == 0, res.stdout

def public():
    "Functions and methods of the package by name, without those that take the types of a parent's method"
    for mod in map(importlib.import_module, (f'kshot_nas.{m}' for m in sorted(modules) if m != 'all')):
        for name in mod.__all__:
            o = getattr(mod, name)
            if inspect.isfunction(o): yield f'{mod.__name__}.{name}',o
            for n,f in vars(o).items() if inspect.isclass(o) else ():
                here = inspect.isfunction(f) and f.__module__.startswith('kshot_nas.')
                ours = here and not any(n in vars(c) for c in o.__mro__[1:])
                if n == '__init__' or (ours and not n.startswith('_')): yield f'{mod.__name__}.{name}.{n}',f

# What may be given in several forms, which the comment beside it tells.
any_form = set('path folder file dls supernet learn bench pred true seeds n_high lam archs params x xs o choices types'.split())

def test_public_functions_have_types():
    "A parameter has a type, or a default that shows it, or takes several"
    params = [(name, p) for name,f in public() for p in inspect.signature(f).parameters.values() if p.kind < p.VAR_POSITIONAL]
    assert len(params) > 200
    bare = [(name, p) for name,p in params if p.default is p.empty and p.annotation is p.empty]
    listed([f'{name}({p.name})' for name,p in bare if p.name not in any_form | {'self'}])

def test_readme_is_the_index_notebook():
    spec = importlib.util.spec_from_file_location('readme', root/'tools/readme.py')
    readme = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(readme)
    text,pictures = readme.render(load(root/'nbs/index.ipynb'))
    assert (root/'README.md').read_text(encoding='utf-8') == text, 'run make readme'
    for path,png in pictures.items(): assert (root/path).read_bytes() == png, f'run make readme: {path} is stale'
    for link in re.findall(r'\]\((nbs/[^)#]+)', text): assert (root/link).exists(), f'README links to {link}'

# Installed elsewhere ---------------------------------------------------------------------------------------------------------

def test_setup_needs_only_the_standard_library():
    tree = ast.parse((root/'setup.py').read_text())
    names = {a.name.split('.')[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module.split('.')[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert names - set(sys.stdlib_module_names) == {'setuptools'}

def test_wheel_works_elsewhere(tmp_path):
    "The package as a user gets it: built, installed into an empty folder, imported from another one."
    src,out,lib,elsewhere = (tmp_path/d for d in ('src', 'out', 'lib', 'elsewhere'))
    left_out = shutil.ignore_patterns('.git', '.venv*', '__pycache__', '*.egg-info', 'build', '_docs', '_proc', 'runs')
    shutil.copytree(root, src, ignore=left_out, symlinks=True)
    elsewhere.mkdir()
    pip = [sys.executable, '-m', 'pip', '-q', '--disable-pip-version-check']
    res = run(*pip, 'wheel', '--no-deps', '--no-build-isolation', '-w', out, src, cwd=tmp_path)
    assert res.returncode == 0, res.stderr
    wheel, = out.glob('*.whl')
    with zipfile.ZipFile(wheel) as z: held,size = set(z.namelist()),sum(i.file_size for i in z.infolist())
    needed = {place(p) for p in (root/'kshot_nas').rglob('*.*') if p.suffix in ('.py', '.npz', '.css')}
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

def test_nothing_newer_than_the_oldest_python():
    oldest = tuple(map(int, cfg['min_python'].split('.')))
    for p in sources: ast.parse(p.read_text(encoding='utf-8'), p.name, feature_version=oldest)

@pytest.mark.parametrize('version', ['3.10', '3.11', '3.12', '3.13', '3.14'])
def test_every_file_compiles(version, tmp_path):
    "With the Python of that version, if there is one: without warnings, and with what its parser knows."
    found = [*map(Path, filter(None, [shutil.which(f'python{version}')])), *Path.home().glob(f'.pyenv/versions/{version}.*/bin/python')]
    exe = next((e for e in found if run(e, '-c', '', cwd=tmp_path).returncode == 0), None)       # there are some that only tell how to get it
    if exe is None: pytest.skip(f'there is no Python {version} on this machine')
    prog = 'import sys; [compile(open(f, "rb").read(), f, "exec") for f in sys.argv[1:]]'
    res = run(exe, '-W', 'error', '-c', prog, *sources, cwd=tmp_path)
    assert res.returncode == 0, res.stderr

def test_import_is_quick(tmp_path):
    "After `fastai.vision.all` all our modules take less than half as long; one quiet moment of three will do."
    mods = ', '.join(f'kshot_nas.{m}' for m in sorted(modules))
    prog = f'from time import process_time as t; a = t(); import fastai.vision.all; b = t(); import {mods}; print((t()-a)/(b-a))'
    took = (run(sys.executable, '-W', 'ignore', '-c', prog, cwd=tmp_path, PYTHONPATH=str(root), OMP_NUM_THREADS='1') for _ in range(3))
    assert any(float(res.stdout or 'nan') < 1.5 for res in took)

# What it is made of and from -----------------------------------------------------------------------------------------------------

def requirements(): return dict(re.match(r'([\w-]+)(.*)', r).groups() for r in cfg['requirements'].split())

def test_what_is_imported_is_declared():
    "At the top of a module; what is imported inside of a function is an extra, or comes with another one."
    known = dict(PIL='pillow', sklearn='scikit-learn')
    tops = {(p, name.split('.')[0]) for p in exported for node in ast.parse(p.read_text(encoding='utf-8')).body
            for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module] if isinstance(node, ast.ImportFrom) and not node.level else [])}
    declared = {*requirements(), *sys.stdlib_module_names, 'kshot_nas'}
    listed([f'{place(p)} imports {m}, which settings.ini does not declare' for p,m in sorted(tops) if known.get(m, m) not in declared])

def test_internals_of_others_have_upper_bounds():
    for name in 'pymoo', 'joblib', 'fastai', 'fastcore', 'fastprogress': assert re.fullmatch(r'>=[\d.]+,<[\d.]+', requirements()[name]), name
    for name,bounds in requirements().items(): assert bounds.startswith('>='), f'{name} has no lower bound, which make test-oldest needs'

def test_sdist_holds_the_tests(tmp_path):
    left_out = shutil.ignore_patterns('.git', '.venv*', '__pycache__', '*.egg-info', 'build', '_docs', '_proc', 'runs')
    shutil.copytree(root, tmp_path/'src', ignore=left_out, symlinks=True)
    res = run(sys.executable, '-W', 'ignore', 'setup.py', '-q', 'sdist', '-d', tmp_path/'out', cwd=tmp_path/'src')
    assert res.returncode == 0, res.stderr
    archive, = (tmp_path/'out').glob('*.tar.gz')
    with tarfile.open(archive) as t: held = {n.split('/', 1)[-1] for n in t.getnames()}
    needed = {place(p) for p in (*exported, *(root/'tests').glob('*.py'), root/'settings.ini')}
    assert needed <= held, needed - held

@pytest.mark.parametrize('file', sorted((root/'.github/workflows').glob('*.yaml')), ids=lambda p: p.name)
def test_workflows_trust_nobody(file):
    "Actions are named by commit, jobs may read and no more, and the one that may write runs nothing of ours."
    text = file.read_text(encoding='utf-8')
    flow = pytest.importorskip('yaml').safe_load(text)
    uses = re.findall(r'uses:\s*(\S+)', text)
    assert uses and not [u for u in uses if not re.fullmatch(r'[\w./-]+@[0-9a-f]{40}', u)]
    assert flow['permissions'] == {'contents': 'read'}
    for job in flow['jobs'].values():
        if 'permissions' in job: assert not any('run' in step or 'checkout' in step.get('uses', '') for step in job['steps'])
        else: assert all(step['with']['persist-credentials'] is False for step in job['steps'] if 'checkout' in step.get('uses', ''))
