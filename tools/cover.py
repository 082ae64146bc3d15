"""Which lines of the package are run, by the notebooks and by what stands in tests/: `python tools/cover.py`, which needs coverage.

A notebook runs its own cells, not the file that is exported from them. So here an exported cell is replaced by the lines of the
file that were made from it, and counts as the file. Name notebooks to run these alone, and `tests` for the tests.
"""
import os
import re
import subprocess
import sys
from pathlib import Path

root = Path(__file__).resolve().parents[1]
nbs  = sorted((root/'nbs').rglob('[0-9]*.ipynb'))

def exported(nb, texts={}):
    "The file that `nb` exports, if it does, and its parts by the id of their cell, each behind as many empty lines as it needs; `texts` stand for files"
    head = rf'# %% [./]+/nbs/{nb.relative_to(root/"nbs").as_posix()} #(\S+)$'
    for file in (root/'kshot_nas').rglob('*.py'):
        lines = (texts.get(file) or file.read_text(encoding='utf-8')).splitlines()
        starts = [(i, m[1]) for i,line in enumerate(lines, 1) if (m := re.match(head, line))]
        ends = [*(i-1 for i,_ in starts[1:]), len(lines)]
        if starts: return file,{name: '\n'*i + '\n'.join(lines[i:j]) for (i,name),j in zip(starts, ends)}
    return None,{}

def run(nb):
    "Run a notebook as `nbdev_test` does, except for its exported cells"
    from execnb.nbio import read_nb
    from execnb.shell import CaptureShell
    file,parts = exported(nb)
    os.chdir(nb.parent)
    shell = CaptureShell(nb)
    if file: shell.user_ns['__package__'] = '.'.join(file.relative_to(root).parts[:-1])     # the file imports from where it is
    for cell in read_nb(nb).cells:
        if cell.cell_type != 'code' or cell.source.startswith('#| slow') or 'nbdev_export(' in cell.source: continue
        if cell.id in parts: exec(compile(parts[cell.id], file, 'exec'), shell.user_ns)
        else: shell.run(cell.source)
        if shell.exc: raise shell.exc

def main(names):
    def coverage(*args): return subprocess.run([sys.executable, '-m', 'coverage', *map(str, args)], cwd=root, env={**os.environ, 'IN_TEST': '1'}).returncode
    (root/'runs').mkdir(exist_ok=True)
    coverage('erase')
    failed = [nb.stem for nb in nbs if (not names or nb.stem in names) and coverage('run', __file__, nb)]
    if not names or 'tests' in names: coverage('run', '-m', 'pytest', '-q') and failed.append('tests')
    coverage('combine', '-q'); coverage('report', '--show-missing', '--sort=cover')
    if failed: sys.exit(f"failed: {', '.join(failed)}")

if __name__ == '__main__': run(Path(sys.argv[1])) if sys.argv[1:] and sys.argv[1].endswith('.ipynb') else main(sys.argv[1:])
