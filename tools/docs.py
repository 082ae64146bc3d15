"""Build the docs site in _docs/, with Quarto where there is one, else or if told so with Sphinx: python tools/docs.py [sphinx]

nbdev processes the notebooks into _proc/. What both builders would show wrong is put right there, and the index of names is
made. Sphinx reads some things differently from Quarto; these are rewritten for it. The sidebar is that of _quarto.yml. Any
warning of Sphinx is an error.
"""
import importlib
import inspect
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import warnings
from functools import partial
from itertools import groupby
from pathlib import Path

import yaml
from docutils.nodes import SkipNode, math, math_block
from nbdev.config import get_config
from nbdev.quarto import refresh_quarto_yml
from nbdev.serve import proc_nbs
from pypandoc import get_pandoc_path
from sphinx.application import Sphinx
from sphinx.util.logging import getLogger

root = Path(__file__).resolve().parents[1]
# What Sphinx calls it; None is what it does anyway
tags = {'echo: false': 'remove-input', 'output: false': 'remove-output', 'include: false': 'remove-cell', 'code-fold: true': 'hide-input',
        'code-fold: show': None, 'code-summary: "Exported source"': None}
linked = r'\[(`[^`]+`)\]\((https?:[^)]+)\)'                                  # what nbdev makes of a name in backticks that it knows

nested = r'\[([^][]*)\[(`[^`]+`)\]\([^)]+\)([^][]*)\]\(([^)]+)\)'             # and of one inside of a link

# What both builders show ------------------------------------------------------------------------------------------------------

def slug(title):
    "The anchor that Quarto gives to a heading"
    return re.sub(r'^[^a-z]+', '', re.sub(r'[^\w\s.-]', '', title.lower()).strip().replace(' ', '-'))

def page_of(file):
    "The page that nbdev makes of the notebook `file`: its number is left out, its folder is kept"
    return re.sub(r'(^|/)[0-9]+_([^/]+)$', r'\1\2', file).replace('.ipynb', '.html')

def sidebar():
    "The files of each section, in order; that of the first one, which has no name, is the start page"
    contents = yaml.safe_load((root/'_quarto.yml').read_text(encoding='utf-8'))['website']['sidebar']['contents']
    return {o['section']: o['contents'] for o in contents if isinstance(o, dict)}, [o for o in contents if isinstance(o, str)]

def is_entry(cell): return cell['cell_type'] == 'code' and 'show_doc(' in cell['source'] and bool(cell['outputs'])
def entry(cell):
    "The text that show_doc has written into `cell`, if it has"
    return ''.join(cell['outputs'][0]['data']['text/markdown']) if is_entry(cell) else ''

def front(nb):
    "Title and subtitle of a processed notebook"
    meta = yaml.safe_load(nb['cells'][0]['source'].strip(' -\n'))
    return meta['title'],meta.get('description', '')

def documented(text, lib):
    "The object that the API entry `text` is about, or None"
    where,name = re.search(rf"/blob/[^/]+/({lib}/[\w/]+)\.py#", text),re.search('^### (.+)', text, re.M)[1]
    try:
        res = importlib.import_module(where[1].replace('/', '.'))
        for part in name.split('.'): res = getattr(res, part)
        return res
    except (TypeError, ImportError, AttributeError): return None

def tidy_entry(text, lib):
    "An API entry with a plain signature: no Markdown in it, classes as such, with what they take only if we have said so"
    before,sig,after = text.split('```', 2)
    sig = re.sub(linked, r'\1', sig).replace('`', '')
    o = documented(text, lib)
    if inspect.isclass(o):
        if o.__init__.__module__.split('.')[0] == lib: sig = sig.replace('python\ndef ', 'python\nclass ', 1)
        else: sig = f"python\nclass {o.__name__}({', '.join(b.__name__ for b in o.__bases__)})\n"
    return '```'.join([before, sig, after.replace('*Call self as a function.*', '')])

def resolver(nbs, cfg):
    "A function from a link that nbdev has made to a relative one, or to none: nbdev also links names that have no entry, and takes one of several"
    host = f'{cfg.doc_host}{cfg.doc_baseurl}/'
    entries = {f'{host}{page_of(f)}#{slug(n)}': (f, n) for f,nb in nbs.items() for c in nb['cells'] for n in re.findall('^### (.+)', entry(c), re.M)}
    methods = {n.rpartition('.')[2] for _,n in entries.values() if '.' in n}
    def api(m, file):
        name,url = m[1].strip('`'),m[2]
        if not url.startswith(cfg.doc_host): return m[0]
        there = entries.get(url) or entries.get(url.rpartition('.')[0])
        if not there or (name in methods and there[0] != file): return m[1]
        return f"[{m[1]}]({posixpath.relpath(there[0], posixpath.dirname(file) or '.')}#{slug(there[1])})"
    return api

def in_order(cells, lib):
    "Cells with API entries before the code that they are about, as it goes: nbdev puts the last name first, and the others behind"
    files = [m[1] for c in cells if (m := re.search(rf'/blob/[^/]+/({lib}/[\w/]+\.py)#', entry(c)))]
    if not files: return cells
    lines = {line: i for i,line in enumerate((root/files[0]).read_text(encoding='utf-8').splitlines(), 1)}
    def is_shown(c): return 'code-summary: "Exported source"' in c['source']
    def place(c):
        if is_entry(c): return int((re.search(r'\.py#L(\d+)', entry(c)) or [0, 0])[1]),0
        return max((lines.get(line, 0) for line in re.findall(r'^(?:class |def |\w+ *=).*', c['source'], re.M)), default=0),1
    runs = ((run, list(cs)) for run,cs in groupby(cells, lambda c: is_entry(c) or is_shown(c)))
    return [c for run,cs in runs for c in (sorted(cs, key=place) if run and all(place(c)[0] for c in cs) else cs)]

def tidy(nbs, cfg):
    "Put right in processed notebooks what nbdev has made wrong"
    for nb in nbs.values(): nb['cells'] = [c for c in nb['cells'] if '*Return repr(self).*' not in entry(c)]    # words that nobody wrote
    api = resolver(nbs, cfg)
    for file,nb in nbs.items():
        here = partial(api, file=file)
        nb['cells'] = in_order(nb['cells'], cfg.lib_name)
        for c in nb['cells']:
            if is_entry(c): c['outputs'][0]['data']['text/markdown'] = re.sub(linked, here, tidy_entry(entry(c), cfg.lib_name))
            if c['cell_type'] == 'markdown': c['source'] = re.sub(linked, here, re.sub(nested, r'[\1\2\3](\4)', c['source']))

def reference(nbs):
    "Tables of all pages and of all names, for the page that tells where everything is"
    def table(head, rows): return '\n'.join([f'| {head[0]} | {head[1]} |', '|---|---|', *(f'| {a} | {b} |' for a,b in rows)])
    pages = [(f'[{title}]({f})', re.sub(r'[.]?$', '', about)) for f,nb in nbs.items() for title,about in [front(nb)] if f != 'index.ipynb']
    names = {}
    for f,nb in nbs.items():
        for text in filter(None, map(entry, nb['cells'])):
            name,about = re.search('^### (.+)', text, re.M)[1],text.split('```')[2].strip().strip('*').split('\n')[0]
            if name.startswith('_'): continue
            about = re.sub(r'\[(`[^`]+`)\]\([^)]+\)', r'\1', about).replace('|', r'\|')
            names[name] = (f"[`{name}`]({f}#{slug(name)})", about)
    return '\n\n'.join(['## Find a name', table(('name', 'what it is'), [names[n] for n in sorted(names, key=str.lower)]),
                        '## Find a page', table(('page', 'what it is about'), pages)])

def process():
    "Process the notebooks as nbdev does, put right what it leaves wrong: the folder and the notebooks of the sidebar, in order"
    warnings.filterwarnings('ignore', message='Found cells containing imports')
    refresh_quarto_yml()
    cfg,proc = get_config(),proc_nbs(n_workers=0)                            # one process, which imports torch once
    sections,first = sidebar()
    nbs = {f: json.loads((proc/f).read_text(encoding='utf-8')) for f in first + sum(sections.values(), []) if f.endswith('.ipynb')}
    for nb in nbs.values():
        for c in nb['cells']: c['source'] = ''.join(c['source'])
    tidy(nbs, cfg)
    for f,nb in nbs.items(): (proc/f).write_text(json.dumps(nb), encoding='utf-8')
    if (root/'nbs/reference.md').exists():
        (proc/'reference.md').write_text((root/'nbs/reference.md').read_text(encoding='utf-8') + '\n' + reference(nbs) + '\n', encoding='utf-8')
    return proc,nbs

# For Sphinx -------------------------------------------------------------------------------------------------------------------

def markdown(cell, text):
    "A markdown cell in place of `cell`, with Quarto's callouts as admonitions"
    def callout(m):
        folded = '\n:collapsible: closed' if 'collapse="true"' in m[0] else ''
        title = re.search('title="([^"]*)"', m[3])
        return f'{m[1]}{{admonition}} {title[1] if title else m[4] or m[2].title()}\n:class: {m[2]}{folded}'
    return dict(id=cell['id'], cell_type='markdown', metadata={},
                source=re.sub(r'^(:::+) *\{\.callout-(\w+)(.*)\}(?:\n+#+ (.+))?', callout, text, flags=re.M))

def convert(cell):
    "A cell as nbdev hands it to Quarto, as Sphinx wants it"
    text = cell['source']
    if cell['cell_type'] == 'raw':                                           # made of the notebook's title and subtitle
        title,about = front(dict(cells=[cell]))
        return markdown(cell, f"# {title}\n\n{{.lead}}\n{about}")
    if entry(cell):
        text = entry(cell).replace('---\n', '', 1).replace('{target=', '{.source target=', 1)
        return markdown(cell, re.sub('^### .+', lambda m: m[0].replace('_', r'\_'), text, flags=re.M))  # __call__ is not a bold "call"
    if cell['cell_type'] == 'markdown': return markdown(cell, text)
    directives = re.findall(r'^#\| *(.+?) *$', text, re.M)
    alts = [yaml.safe_load(d)['fig-alt'] for d in directives if d.startswith('fig-alt:')]
    directives = [d for d in directives if not d.startswith('fig-alt:')]
    if unknown := [d for d in directives if d not in tags]:
        raise ValueError(f'tools/docs.py knows of {list(tags)} and not of "#| {unknown[0]}"')
    metadata = dict(tags=[tags[d] for d in directives if tags[d]])
    if alts: metadata['mystnb'] = dict(image=dict(alt=alts[0] if isinstance(alts[0], str) else ' '.join(alts[0])))
    return {**cell, 'source': re.sub(r'^#\|.*\n?', '', text, flags=re.M), 'metadata': metadata}

def toctree(caption, files): return '\n'.join(['```{toctree}', ':hidden:', f':caption: {caption}', '', *files, '```'])

def setup(app):
    "Sphinx calls this: formulas become MathML, by pandoc as in Quarto, which a browser draws without a script or a network"
    drawn = {}
    def draw(app, doctree):
        nodes = list(doctree.findall(lambda n: isinstance(n, (math, math_block))))
        tex = '\n\n'.join(('$$%s$$' if isinstance(n, math_block) else '$%s$') % n.astext().strip() for n in nodes)
        res = subprocess.run([get_pandoc_path(), '--mathml'], input=tex, capture_output=True, encoding='utf-8', check=True)
        if res.stderr: getLogger(__name__).warning(res.stderr, location=app.env.docname)
        html = re.sub('(<mo>&#8289;</mo>)(?=</mrow><m[in])', r'\1<mspace width="0.17em"></mspace>', res.stdout)    # log p, not logp
        drawn.update(zip([(type(n), n.astext()) for n in nodes], re.findall('<math.*?</math>|<span class="math.*?</span>', html, re.S), strict=True))
    def inline(self, node): self.body.append(drawn[math, node.astext()]); raise SkipNode
    def block(self, node): self.body.append(f'<div class="formula">{drawn[math_block, node.astext()]}</div>'); raise SkipNode
    app.connect('doctree-read', draw)
    app.add_html_math_renderer('mathml', (inline, None), (block, None))
    app.add_css_file('style.css')
    app.add_js_file(None, priority=900, body="DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = location.protocol != 'file:'")    # a file may not fetch others

def sphinx(proc, nbs):
    "Write the pages with Sphinx; returns its exit status, and the folder"
    cfg,work = get_config(),proc/'sphinx'
    src,out = work/'src',work/'html'
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(proc, src, ignore=shutil.ignore_patterns('*.ipynb', 'sphinx', '_docs', '*.yml'))
    sections,_ = sidebar()
    for f,nb in nbs.items():
        nb = {**nb, 'cells': [convert(c) for c in nb['cells']]}
        if f == 'index.ipynb': nb['cells'].append(dict(id='contents', cell_type='markdown', metadata={}, source='\n\n'.join(toctree(*s) for s in sections.items())))
        (src/f).write_text(json.dumps(nb), encoding='utf-8')
    app = Sphinx(src, None, out, work/'doctrees', 'html', status=None, warningiserror=True, confoverrides=dict(
        project=cfg.title, html_title=cfg.title, author=cfg.author, copyright=cfg.copyright, extensions=['myst_nb', 'sphinx_copybutton', 'docs'],
        html_theme='sphinx_book_theme', html_static_path=[str(root/'nbs/style.css')], html_copy_source=False, html_use_index=False,
        html_math_renderer='mathml', html_context=dict(default_mode='auto'),
        html_theme_options=dict(repository_url=cfg.git_url, repository_branch=cfg.branch, path_to_docs='nbs', use_repository_button=True, use_source_button=True,
                                use_issues_button=True, use_download_button=False, use_fullscreen_button=False, navbar_persistent=[], show_toc_level=2),
        nb_execution_mode='off', nb_merge_streams=True, nb_render_markdown_format='myst', nb_code_prompt_show='Show the code', nb_code_prompt_hide='Hide the code',
        myst_heading_anchors=4, myst_heading_slug_func='docs.slug', myst_update_mathjax=False, myst_dmath_allow_space=False, myst_dmath_allow_digits=False,
        myst_enable_extensions=['dollarmath', 'amsmath', 'colon_fence', 'attrs_inline', 'attrs_block'],
        suppress_warnings=['myst.header']))                                  # API entries are third-level headings, wherever they stand
    app.build()
    return app.statuscode,out

def quarto(proc, nbs):
    "Write the pages with Quarto, and nothing else; returns its exit status, and the folder"
    return subprocess.run(['quarto', 'render', '--no-cache'], cwd=proc).returncode,proc/get_config().doc_path.name

def main():
    os.chdir(root)
    doc_path,(proc,nbs) = get_config().doc_path,process()
    build = sphinx if 'sphinx' in sys.argv[1:] or not shutil.which('quarto') else quarto
    status,out = build(proc, nbs)
    if status == 0:
        shutil.rmtree(doc_path, ignore_errors=True)
        shutil.move(out, doc_path)
        print(f'wrote {len(nbs)} pages: open {doc_path.name}/index.html')
    return status

if __name__ == '__main__': sys.exit(main())
