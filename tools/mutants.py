"""Small faults put into the package, one at a time, to see whether the notebooks notice: `python tools/mutants.py`, or `make mutants`.

A fault is a changed operator, number, condition or argument, or a call left out. It is caught if the module's own notebook fails,
or one of two notebooks that import the module. All of it happens in a copy of the repository, so work can go on meanwhile.
What was found stands in runs/mutants.jsonl, and is not tried again as long as the code around it is the same; survivors are tried
again with --again. Name modules to try these alone.
"""
import argparse
import ast
import copy
import hashlib
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter
from contextlib import suppress
from pathlib import Path

from cover import exported, nbs, root

found = Path(os.environ.get('MUTANTS_FOUND', root/'runs/mutants.jsonl'))
heavy = 'fastai.vision.all fastcore.test scipy.stats sklearn.datasets pandas matplotlib.pyplot pymoo.algorithms.moo.nsga2 joblib cloudpickle nbdev.showdoc torchvision'.split()

# What is changed --------------------------------------------------------------------------------------------------------------

swaps = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn,
         ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add, ast.Pow: ast.Mult,
         ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.And: ast.Or, ast.Or: ast.And}
names = dict(min='max', max='min', any='all', all='any', argmax='argmin', argmin='argmax', amin='amax', amax='amin', sum='mean', mean='sum', floor='ceil', ceil='floor')

def changes(node):
    "What could be made of a part of the code instead"
    def other(**kwargs): return ast.copy_location(type(node)(**{**{f:getattr(node, f) for f in node._fields}, **kwargs}), node)
    if isinstance(node, ast.Compare):
        for i,op in enumerate(node.ops): yield other(ops=[*node.ops[:i], swaps[type(op)](), *node.ops[i+1:]])
    if isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in swaps: yield other(op=swaps[type(node.op)]())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)): yield node.operand
    if isinstance(node, ast.IfExp): yield other(test=ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.Constant) and isinstance(node.value, bool): yield other(value=not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)): yield other(value=node.value+1 if isinstance(node.value, int) else node.value*1.5 or 0.1)
    if isinstance(node, ast.Call):
        for k in node.keywords:
            if k.arg: yield other(keywords=[o for o in node.keywords if o is not k])
        f = node.func
        if isinstance(f, ast.Name) and f.id in names: yield other(func=ast.Name(names[f.id]))
        if isinstance(f, ast.Attribute) and f.attr in names: yield other(func=ast.Attribute(f.value, names[f.attr]))

def silent(node): return isinstance(node, (ast.Raise, ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom))

def draws(node): return isinstance(node, ast.FunctionDef) and (node.name.startswith('plot_') or 'ax' in [a.arg for a in node.args.args])

def nodes(node, names=(), top=None):
    "All parts of the code but types, decorators, pictures, and what errors say; with the names around them, and the statement or expression they are part of"
    for field,value in ast.iter_fields(node):
        if field in ('annotation', 'returns', 'decorator_list', 'type_comment'): continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or silent(child) or draws(child): continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant): continue      # a docstring
            inner = names + (child.name,) if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else names
            whole = child if isinstance(node, ast.stmt) and hasattr(node, 'body') or isinstance(node, ast.Module) else top or child
            yield child,names,whole
            yield from nodes(child, inner, None if hasattr(child, 'body') and isinstance(child, ast.stmt) else whole)

def mutants(text, module=''):
    "Every mutant of a module: its key, the line, what stands there, what is put there, and the whole text with it"
    raw,starts,count = text.encode(),[0],Counter()
    for line in raw.splitlines(keepends=True): starts.append(starts[-1] + len(line))
    def span(n): return starts[n.lineno-1] + n.col_offset,starts[n.end_lineno-1] + n.end_col_offset
    for node,names,whole in nodes(ast.parse(text)):
        def mutant(node, new):
            (a,b),around = span(node),ast.unparse(whole if not hasattr(whole, 'body') else node)
            about = '\0'.join([module, *names, around, ast.unparse(node), new])                    # neither lines nor layout
            count[about] += 1
            key = hashlib.sha256(f'{about}\0{count[about]}'.encode()).hexdigest()[:12]
            return key,node.lineno,raw[a:b].decode(),new,(raw[:a] + new.encode() + raw[b:]).decode()
        for new in changes(node): yield mutant(node, f'({ast.unparse(ast.fix_missing_locations(copy.deepcopy(new)))})')
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call): yield mutant(node, 'None')
        if isinstance(node, ast.If): yield mutant(node.test, f'(not ({ast.unparse(node.test)}))')

# Mutants that nobody could notice, by module and a part of their line, or such a part and the change as it is printed, and why
equal = dict(
    card={"if o > 1 else": 'what is told is whole, or below 1'},
    contrast={'torch.eye(': 'there is no other device where tests run', ('', 'new[l]+way -> (new[l] - way)'): 'either way comes first with the same chance'},
    export={'tol:float=1e-4': 'rounding stays far below, what is wrong far above'},
    finalists={'workers:int=1,': 'others give the same', 'len(todo) < 2': 'others give the same', '_column(found.metric, curves[0])': 'all have the same columns'},
    rank={'seed:int=0        # of the resampling': 'any seed will do'},
    recorder={'+1,': 'nothing comes between'},
    layers={'stride != (1,1)': 'to take every pixel first gives the same numbers'},
    sample={'np.pad(left, (s, 0))[:n]': 'what is added behind is cut off',
            ('shares =', 'np.divide(ways, total, out=np.ones_like(ways), where=total > 0) -> (np.divide(ways, total, where=total > 0))'): 'no draw comes to a total without ways'},
    simplex={('torch.empty(0)', '0 -> (1)'): 'only device and type are asked for'},
    space={('', 'min(xs, default=0) < 0 -> (min(xs, default=0) <= 0)'): 'a number that is let through at once is let through when looked at'},
    optimizer={'fused=True': 'faster, and the same'},
    problem={'merit = sum(': 'random numbers of either sign', 'rng.integers(2**31)': 'any seed will do'})

def same(module, text, m):
    "Is `m` one of those?"
    line = text.splitlines()[m[1]-1]
    def fits(part): return part[0] in line and part[1] == f'{m[2]} -> {m[3]}' if isinstance(part, tuple) else part in line and (m[2].splitlines()[0] in part or part in m[2])
    return any(map(fits, equal.get(module, {})))

def some(text, n, module=''):
    "`n` mutants that can be noticed, always the same, in different lines as far as there are enough"
    seen = Counter()
    def turn(m): seen[m[1]] += 1; return seen[m[1]]
    every = sorted(m for m in mutants(text, module) if not same(module, text, m))               # by their keys, which are random
    return sorted(sorted(every, key=turn)[:n], key=lambda m: m[1])                              # of each line one, then the second

# Who notices ------------------------------------------------------------------------------------------------------------------

def steps(nb, file):
    "Run the notebook `nb` cell by cell, after the module `file` has changed; the id of a cell is told before it is run"
    own,_ = exported(nb)
    if own != file:                                                                             # it imports the module
        for name in [n for n in sys.modules if n.split('.')[0] == 'kshot_nas']: del sys.modules[name]
    os.chdir(nb.parent)
    main = sys.modules['__main__'] = types.ModuleType('__main__')
    if own: main.__package__ = '.'.join(own.relative_to(root).parts[:-1])
    for cell in json.loads(nb.read_text(encoding='utf-8'))['cells']:
        source = ''.join(cell['source'])
        if cell['cell_type'] != 'code' or source.startswith('#| slow') or 'nbdev_export(' in source: continue
        yield cell['id']
        parts = exported(nb)[1]
        exec(compile(parts.get(cell['id'], source), own if cell['id'] in parts else f"cell {cell['id']}", 'exec'), vars(main))

def finish(it):
    for _ in it: pass

def outcome(f, limit):
    "What `f()` returns in a process of its own with `limit` seconds of a processor, or None and how that ended instead"
    told,tell = os.pipe()
    if not (pid := os.fork()):
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2): os.dup2(null, fd)
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (6*2**30,)*2)                                  # a fault may ask for any amount
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit)+1,)*2)                              # others may be at work on the machine
        try: os.write(tell, json.dumps([f(), 'passed']).encode())
        except BaseException as e: os.write(tell, json.dumps([None, f'{type(e).__name__}: {str(e).strip()[:150]}']).encode())
        finally: os._exit(0)
    os.close(tell)
    end = time.monotonic() + 20*limit
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.killpg(pid, 9); ended = os.waitpid(pid, 0)
            break
        time.sleep(0.02)
    with suppress(ProcessLookupError): os.killpg(pid, 9)                                        # workers that it left behind
    with open(told, 'rb') as f: os.set_blocking(told, False); said = f.read()
    return json.loads(said) if said else [None, 'it took too long' if ended[1] == signal.SIGKILL else 'it died']

def processor(): return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])                   # seconds that children which have ended used

def with_text(file, text, changed, f, limit):
    "The outcome of `f` while the module has other contents"
    file.write_text(changed, encoding='utf-8')
    try: return outcome(f, limit)[1]
    finally: file.write_text(text, encoding='utf-8')

def own_notebook(nb, file, text, tried, limit):
    "How the module's own notebook ends with each of its mutants: what stands before the changed cell is run once for all"
    said,parts,it = {},exported(nb)[1],steps(nb, file)
    def cell(changed): return next(c for c,part in exported(nb, {file: changed})[1].items() if part.strip() != parts[c].strip())
    where = {m:cell(m[-1]) for m in tried}
    for at in it:
        for i,m in enumerate(tried):
            if where[m] == at: said[i] = with_text(file, text, m[-1], lambda: finish(it), limit)
    return [said[i] for i in range(len(tried))]                 # it came to its own end behind them all, so none has spoiled it for others

# All of them ------------------------------------------------------------------------------------------------------------------

def importers(file):
    "Two notebooks of the method that import a module, the nearest first"
    return [nb for nb in nbs if nb.parent == root/'nbs' and f'kshot_nas.{file.stem} import' in nb.read_text(encoding='utf-8')][:2]

def in_a_copy(argv):
    "Start this program again in a copy of the repository, where files may be changed"
    with tempfile.TemporaryDirectory() as tmp:
        for name in ('kshot_nas', 'nbs', 'tools', 'tests', 'settings.ini'):
            if (root/name).is_file(): shutil.copy(root/name, tmp)
            else: shutil.copytree(root/name, Path(tmp)/name, ignore=shutil.ignore_patterns('__pycache__'))
        env = {**os.environ, 'MUTANTS_FOUND': str(found), 'PYTHONPATH': tmp, 'PYTHONDONTWRITEBYTECODE': '1'}
        return subprocess.run([sys.executable, '-W', 'ignore', f'{tmp}/tools/mutants.py', *argv], env=env, cwd=tmp).returncode

def results(): return [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else []

def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('modules', nargs='*', help='such as layers; all of the method if none is named')
    p.add_argument('--n', type=int, default=10, help='mutants of each module')
    p.add_argument('--again', action='store_true', help='try survivors again')
    args = p.parse_args(argv)
    if 'MUTANTS_FOUND' not in os.environ: sys.exit(in_a_copy(sys.argv[1:]))
    for name in heavy: importlib.import_module(name)
    import matplotlib
    import matplotlib.pyplot as plt
    import torch
    matplotlib.use('agg'); torch.set_num_threads(1); plt.show = plt.close
    os.environ['IN_TEST'] = '1'
    found.parent.mkdir(exist_ok=True)
    modules = {file.stem:(nb, file) for nb in nbs if (file := exported(nb)[0]) and file.parent == root/'kshot_nas' and file.stem != 'all'}
    for nb,file in [modules[name] for name in args.modules or modules]:
        module = importlib.import_module(f'kshot_nas.{file.stem}')
        if Path(module.__file__) != file: sys.exit(f'{module.__file__} would be tried, not {file}')
        text,known = file.read_text(encoding='utf-8'),{r['key']:r for r in results()}
        survived = {k for k,r in known.items() if not r['caught']}
        tried = [m for m in mutants(text, file.stem) if m[0] in survived and not same(file.stem, text, m)] if args.again else [m for m in some(text, args.n, file.stem) if m[0] not in known]
        took = {nb: 60} if args.again else {}                                                   # it came to its end before
        def limit(witness):
            if witness not in took:
                start = processor()
                if (how := outcome(lambda: finish(steps(witness, file)), 900)[1]) != 'passed': sys.exit(f'{witness.name} fails as it is: {how}')
                took[witness] = processor() - start
            return 4*took[witness] + 10
        if not tried: continue
        longest = limit(nb)
        said,how = outcome(lambda: own_notebook(nb, file, text, tried, longest), 10**5)
        if said is None:
            print(f'{nb.name} does not bear mutants one after the other ({how}), so each begins anew', flush=True)
            said = [with_text(file, text, m[-1], lambda: finish(steps(nb, file)), longest) for m in tried]
        for m,how in zip(tried, said):
            key,line,old,new,changed = m
            witnesses = [nb, *importers(file)]
            while how == 'passed' and witnesses[1:]: del witnesses[0]; how = with_text(file, text, changed, lambda: finish(steps(witnesses[0], file)), limit(witnesses[0]))
            row = dict(key=key, module=file.stem, line=line, old=old, new=new, caught=how != 'passed' and witnesses[0].name, how=how)
            with open(found, 'a') as f: f.write(json.dumps(row) + '\n')
            print(f"{'caught  ' if row['caught'] else 'SURVIVED'} {file.stem}:{line}: {old} -> {new}", flush=True)
    texts = {name:file.read_text(encoding='utf-8') for name,(_,file) in modules.items()}
    here = {m[0] for name,text in texts.items() for m in mutants(text, name) if not same(name, text, m)}    # what the code still has
    latest = {r['key']:r for r in results() if r['key'] in here and (not args.modules or r['module'] in args.modules)}
    survivors = [r for r in latest.values() if not r['caught']]
    total,alive = (Counter(r['module'] for r in rows) for rows in (latest.values(), survivors))
    for name in total: print(f"{name:<12} {total[name]-alive[name]} of {total[name]} caught")
    print(f"{len(latest)-len(survivors)} of {len(latest)} caught")
    for r in survivors: print(f"  {r['module']}:{r['line']}: {r['old']} -> {r['new']}")

if __name__ == '__main__': main()
