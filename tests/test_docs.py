"The docs site: what tools/docs.py hands to Quarto or to Sphinx, what the pages of Sphinx hold, and how they do in a real browser."
import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

for package in ('nbdev', 'sphinx', 'myst_nb', 'sphinx_book_theme', 'sphinx_copybutton', 'pypandoc', 'yaml', 'bs4'): pytest.importorskip(package)

import yaml
from bs4 import BeautifulSoup, NavigableString
from test_report import Browser, needs_browser

root = Path(__file__).resolve().parents[1]

def run(project): return subprocess.run([sys.executable, project/'tools/docs.py', 'sphinx'], cwd=project, capture_output=True, text=True, env={**os.environ, 'OMP_NUM_THREADS': '1'})

def copy_project(dest, nbs=True):
    "What the site is made of, copied to `dest`"
    for d in ('tools', 'nbs'): (dest/d).mkdir(parents=True)
    for d in ('kshot_nas', *['nbs']*nbs): shutil.copytree(root/d, dest/d, dirs_exist_ok=True)
    for f in ('settings.ini', '_quarto.yml', 'tools/docs.py', 'nbs/style.css', 'README.md'): shutil.copy(root/f, dest/f)
    return dest

def small_project(dest, **nbs):
    "A project of the notebooks `nbs`, each a list of cells"
    (copy_project(dest, nbs=False)/'nbs/images').mkdir()
    contents = ['index.ipynb', dict(section='More', contents=[f'{n}.ipynb' for n in nbs if n != 'index'])]
    (dest/'_quarto.yml').write_text(yaml.safe_dump(dict(website=dict(sidebar=dict(contents=contents)))))
    kernel = dict(kernelspec=dict(display_name='python3', language='python', name='python3'))
    for name,cells in nbs.items():
        cells = [dict(id=f'c{i}', metadata={}, **c) for i,c in enumerate([text('# A title\n\n> and more'), *cells])]
        file = dest/f'nbs/{name}.ipynb'
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(dict(cells=cells, metadata=kernel, nbformat=4, nbformat_minor=5)))
    return dest

def text(source): return dict(cell_type='markdown', source=source)
def code(source, printed=''): return dict(cell_type='code', source=source, execution_count=1, outputs=[dict(output_type='stream', name='stdout', text=printed)])

@pytest.fixture(scope='session')
def site(tmp_path_factory):
    project = copy_project(tmp_path_factory.mktemp('project'))
    res = run(project)
    assert res.returncode == 0 and 'WARNING' not in res.stderr, res.stderr[-3000:]
    return project/'_docs'

# What both builders are given ------------------------------------------------------------------------------------------------------

@pytest.fixture(scope='session')
def processed(site):
    "Cells of the processed notebooks by file, sources joined; markdown is that of the text, of outputs and of API entries"
    res = {}
    for file in files_of(sidebar(site)):
        if not file.endswith('.ipynb'): continue
        res[file] = cells = json.loads((site.parent/'_proc'/file).read_text(encoding='utf-8'))['cells']
        for c in cells: c['source'],c['data'] = ''.join(c['source']),[{k: ''.join(v) for k,v in o.get('data', {}).items()} for o in c.get('outputs', [])]
    return res

def tool():
    "tools/docs.py as a module"
    spec = importlib.util.spec_from_file_location('docs', root/'tools/docs.py')
    docs = importlib.util.module_from_spec(spec); spec.loader.exec_module(docs)
    return docs

def files_of(contents): return [f for o in contents for f in ([o] if isinstance(o, str) else o['contents'])]
def is_entry(c): return c['cell_type'] == 'code' and '\nshow_doc(' in c['source']
def shown(c): return c['cell_type'] == 'code' and 'echo: false' not in c['source']
def markdown_of(c): return [c['source']]*(c['cell_type'] == 'markdown') + [d['text/markdown'] for d in c['data'] if 'text/markdown' in d]
def every(processed, kind): return [(f, c) for f,cells in processed.items() for c in cells if kind(c)]

def listed(places):
    "Fail with a list of `places` if there are any"
    if places: pytest.fail('\n'.join(places), pytrace=False)

def signatures(processed):
    for f,c in every(processed, is_entry): yield f"{f}: {c['source'].split('show_doc(')[1].rstrip(')')}",c['data'][0]['text/markdown']

def test_signatures_are_plain(processed):
    "No Markdown in them, no words that nobody wrote, and no list of arguments that only a parent takes"
    found = dict(signatures(processed))
    assert len(found) > 200
    listed([f'{name}: {line}' for name,text in found.items() for line in text.split('```')[1].splitlines() if '](' in line or '`' in line])
    listed([name for name,text in found.items() if 'Call self as a function' in text or 'Return repr(self)' in text])
    learner = found['36_score.ipynb: KShotLearner'].split('```')[1]
    assert 'class KShotLearner(' in learner and 'moms' not in learner

def test_a_class_shows_its_own_arguments():
    "And its parents, if it takes what they take; nobody's words are left out, Markdown is not shown"
    docs = tool()
    def sig(text): return docs.tidy_entry(text, 'kshot_nas').split('```')[1]
    def entry(where, name, lines): return f'[source](https://x/blob/main/kshot_nas/{where}.py#L1)\n\n### {name}\n\n```python\ndef {name}({lines}):\n```\n\n*Call self as a function.*'
    assert sig(entry('retrain', 'RetrainLearner', 'dls, # [`DataLoaders`](https://docs.fast.ai/x)')).startswith('python\nclass RetrainLearner(')
    assert sig(entry('space', 'Arch', 'ops, # `tuple`')) == 'python\nclass Arch(ops, # tuple):\n'
    assert sig(entry('search', 'search', 'what, # [`x`](https://y)')) == 'python\ndef search(what, # x):\n'
    assert 'Call self' not in docs.tidy_entry(entry('space', 'Arch', ''), 'kshot_nas')

def test_entries_go_with_the_code(processed):
    "They stand before the code that they are about, in its order"
    for f,cells in processed.items():
        found = [m for c in cells if is_entry(c) and (m := re.search(r'\.py#L([0-9]+)', c['data'][0]['text/markdown']))]
        assert [int(m[1]) for m in found] == sorted(int(m[1]) for m in found), f
    names = [re.findall(r'show_doc\((\w+)|^class (\w+)', c['source'], re.M) for c in processed['12_layers.ipynb']]
    assert names.index([('KConv2d', '')]) + 1 == names.index([('', 'KConv'), ('', 'KConv1d'), ('', 'KConv2d')])

def test_arguments_are_explained_by_their_own_comments():
    "fastcore prints the comment after **kwargs as that of the return value"
    for p in sorted((root/'kshot_nas').rglob('*.py')):
        listed([f'{p.name}:{i}: {line.strip()}' for i,line in enumerate(p.read_text(encoding='utf-8').splitlines(), 1)
                if re.match(r'\s*(def .*)?\*\*\w+,?\s*(\)[^#]*)?#', line) and not line.lstrip().startswith('#')])

def test_links_to_names_lead_there(processed):
    "To an entry that exists, by a name that can only mean this one"
    docs = tool()
    texts = [(f, t) for f,c in every(processed, lambda c: True) for t in markdown_of(c)]
    assert not [f'{f}: {m}' for f,t in texts for m in re.findall(r'\[`[^`]+`\]\(https://kshot[^)]*\)', t)]
    links = [(f, *m) for f,t in texts for m in re.findall(r'\[`([^`]+)`\]\(([^):#]*)#([\w.]+)\)', t)]
    there = {(f, docs.slug(n)) for f,t in texts for n in re.findall('^### (.+)', t, re.M)}
    assert len(links) > 100
    listed([f'{f}: {name} leads to {to}#{anchor}' for f,name,to,anchor in links
            if (os.path.normpath(os.path.join(os.path.dirname(f), to)), anchor) not in there or name.startswith('_')
            or anchor.split('.')[-1] != docs.slug(name).split('.')[-1] and not anchor.startswith(docs.slug(name).split('.')[0])])

def test_pages_are_called_by_their_names(processed):
    "A page has a title and no number; in the tables of the start page, links bear the titles"
    texts = [(f, t) for f,c in every(processed, lambda c: True) for t in markdown_of(c)]
    listed([f'{f}: {m}' for f,t in texts for m in re.findall(r'[Cc]hapters? [0-9]+|[Nn]otebook [0-9]+', t)])
    titles = {f: yaml.safe_load(cells[0]['source'].strip(' -\n'))['title'] for f,cells in processed.items()}
    assert len(set(titles.values())) == len(titles)
    links = [m for _,t in texts if _ == 'index.ipynb' for m in re.findall(r'^\| \[([^]]+)\]\(([^)]+ipynb)\)', t, re.M)]
    assert len(links) > 10
    listed([f'index: "{name}" is the page "{titles[f]}"' for name,f in links if titles[f] != name])

widest = 88        # columns that fit beside the sidebar; the style sheet wraps the rest

def test_readers_see_the_whole_line(processed):
    lines = [(f, line) for f,c in every(processed, shown) if not is_entry(c) for line in c['source'].splitlines()
             if not line.startswith('#|')]
    lines += [(f, line) for f,c in every(processed, lambda c: c['cell_type'] == 'markdown')
              for block in re.findall(r'^```[^\n]*\n(.*?)^```', c['source'], re.M | re.S) for line in block.splitlines()]
    listed([f'{f}: {len(line)} columns: {line}' for f,line in lines if len(line) > widest])

def test_pictures_have_words(processed):
    "For those who can't see them: `#| fig-alt: \"...\"` in the cell, or the text of a Markdown picture"
    bare = [f'{f}: {c["source"][:80]!r}' for f,c in every(processed, lambda c: any('image/png' in d or 'image/svg+xml' in d for d in c['data']))
            if not re.search(r'^#\| fig-alt: ..', c['source'], re.M) and 'output: false' not in c['source']]
    listed(bare + [f'{f}: {m}' for f,c in every(processed, lambda c: True) for t in markdown_of(c) for m in re.findall(r'!\[\]\(.*', t)])

def test_the_start_page_and_readme_stay(site):
    "Nothing but _docs and _proc is written"
    proj = site.parent
    assert (proj/'README.md').read_bytes() == (root/'README.md').read_bytes()
    assert {p.name for p in proj.iterdir()} == {'_docs', '_proc', '_quarto.yml', 'README.md', 'kshot_nas', 'nbs', 'settings.ini', 'tools'}

def test_only_pages_are_asked_of_quarto(tmp_path):
    "A Quarto that writes down what it is asked for: pages and no README, in a folder of their own"
    proj = small_project(tmp_path/'project', index=[text('some `Arch`')])
    fake = tmp_path/'bin/quarto'
    fake.parent.mkdir()
    fake.write_text(f'#!{sys.executable}\nimport sys, pathlib\npathlib.Path("{tmp_path}/asked").open("a").write(" ".join(sys.argv[1:]) + "\\n")\n'
                    'pathlib.Path("_docs").mkdir(); pathlib.Path("_docs/index.html").write_text("x"); pathlib.Path("_docs/README.md").write_text("x")\n')
    fake.chmod(0o755)
    before = {p.name for p in proj.iterdir()}
    res = subprocess.run([sys.executable, proj/'tools/docs.py'], cwd=proj, capture_output=True, text=True, env={**os.environ, 'PATH': f"{fake.parent}:{os.environ['PATH']}"})
    assert res.returncode == 0, res.stderr
    assert (tmp_path/'asked').read_text() == 'render --no-cache\n' and (proj/'_docs/index.html').exists()
    assert {p.name for p in proj.iterdir()} - before == {'_docs', '_proc'} and (proj/'README.md').read_bytes() == (root/'README.md').read_bytes()
    assert 'nbdev_docs' not in (root/'Makefile').read_text() + (root/'.github/workflows/docs.yaml').read_text()

def test_the_bar_leads_to_the_sources():
    cfg = yaml.safe_load((root/'_quarto.yml').read_text())['website']
    ini = (root/'settings.ini').read_text()
    user,repo = (re.search(rf'^{k} = (.+)', ini, re.M)[1] for k in ('user', 'repo'))
    assert [t['href'] for t in cfg['navbar']['right']] == [f'https://github.com/{user}/{repo}']
    assert 'source' in cfg['repo-actions'] and cfg['repo-subdir'] == 'nbs'

def test_quarto_is_told_what_readers_need():
    "Long lines of code go on below, formulas need no network, the dark is dark, and nothing is run"
    cfg = yaml.safe_load((root/'_quarto.yml').read_text())
    html = cfg['format']['html']
    assert (html['code-overflow'], html['html-math-method'], html['css']) == ('wrap', 'mathml', 'style.css')
    assert set(html['theme']) == {'light', 'dark'} and html['respect-user-color-scheme'] is True
    assert int(html['grid']['body-width'].removesuffix('px')) >= 900
    assert cfg['execute'] == dict(enabled=False) and cfg['website']['navbar']['search'] is True

# What Sphinx makes of it -----------------------------------------------------------------------------------------------------------

@cache
def soup(page): return BeautifulSoup(page.read_text(encoding='utf-8'), 'html.parser')
@cache
def anchors(page): return {tag['id'] for tag in soup(page).find_all(id=True)}
def pages(site): return [p for p in sorted(site.rglob('*.html')) if p.name != 'search.html' and '_static' not in p.parts]
def name_of(site, page): return page.relative_to(site).as_posix()
def sidebar(site): return yaml.safe_load((site.parent/'_quarto.yml').read_text())['website']['sidebar']['contents']

def problems(site):
    "What is wrong with the pages: links, pictures, and text that should have been turned into something else"
    for page in pages(site):
        name = name_of(site, page)
        for tag in soup(page).find_all(lambda t: t.get('href') or t.get('src')):
            url = tag.get('href') or tag['src']
            if re.match('[a-z]+:', url):
                if tag.name != 'a': yield f'{name} loads {url}'
                continue
            file,_,anchor = url.partition('#')
            file = (page.parent/file.partition('?')[0]).resolve() if file else page
            if not file.is_file(): yield f'{name} points to {url}: no such file'
            elif anchor and anchor not in anchors(file): yield f'{name} points to {url}: no such anchor'
        for string in soup(page).body.find_all(string=True):
            if type(string) is not NavigableString: continue
            inside = {p.name for p in string.parents}
            marks = r'\]\(http' if 'pre' in inside else r'#\||:::|\$\$|\$[^$\s]([^$]*[^$\s])?\$(?!\d)|\]\(|\{[.#]?[\w-]+=|\\[a-z]+'
            if inside & {'code', 'script', 'style', 'annotation'}: continue
            if re.search(marks, string): yield f'{name} has raw text: {string.strip()[:200]}'

def test_pages_are_sound(site): assert list(problems(site)) == []

@pytest.mark.parametrize('html, told', [
    ('<a href="nowhere.html">x</a>', 'no such file'), ('<a href="#nowhere">x</a>', 'no such anchor'), ('<img src="no.png">', 'no such file'),
    ('<script src="https://example.org/x.js"></script>', 'loads'), ('<img src="https://example.org/x.png">', 'loads'),
    ('<p>#| hide</p>', 'raw'), ('<p>::: {.column}</p>', 'raw'), ('<p>then $K$ of them</p>', 'raw'), ('<p>$$x=1$$</p>', 'raw'), ('<math><mi>\\arg</mi></math>', 'raw'), ('<p>[a](b)</p>', 'raw')])
def test_problems_are_found(tmp_path, html, told):
    (tmp_path/'index.html').write_text(f'<html><body><p>about 5$ <code>$x$ #|</code></p>{html}</body></html>')
    found, = problems(tmp_path)
    assert told in found

def test_every_page_of_the_sidebar(site):
    files = [re.sub('[.](ipynb|md)$', '.html', f) for f in files_of(sidebar(site))]
    assert set(files) == {name_of(site, p) for p in pages(site)} and files[0] == 'index.html'
    names = [re.sub(r'(^|/)\d+_', r'\1', f) for f in files]
    assert len(set(names)) == len(names), 'Quarto would write two notebooks to one page'
    nav = soup(site/'index.html').find('nav', class_='bd-links')
    assert [a['href'] for a in nav.find_all('a') if a['href'] != '#'] == files[1:]
    assert [c.text for c in nav.find_all(class_='caption')] == [o['section'] for o in sidebar(site) if isinstance(o, dict)]

def test_pages_hold_what_the_notebooks_do(site):
    for page in pages(site):
        name = name_of(site, page)
        nb = site.parent/'_proc'/name.replace('.html', '.ipynb')
        if not nb.exists(): continue                                          # reference and changelog
        cells = json.loads(nb.read_text())['cells']
        outputs = [o.get('data', {}) for c in cells for o in c.get('outputs', [])]
        article = soup(page).find('article')
        assert any('blob/main/nbs/' in a['href'] for a in soup(page).select('a.dropdown-item, a.btn')), f'{name} has no link to its notebook'
        assert len(article.select('.cell_output img')) == sum('image/png' in o for o in outputs), f'{name} lacks pictures'
        assert len(article.select('a.source')) == sum('show_doc(' in ''.join(c['source']) for c in cells), f'{name} lacks API entries'
        assert len(article.select('.cell_output table.dataframe')) == sum('class="dataframe"' in ''.join(o.get('text/html', '')) for o in outputs), f'{name} lacks tables'

def test_what_quarto_understands(tmp_path):
    "Callouts, folded, shown and hidden code, figure attributes, formulas, links with anchors, from folder to folder"
    proj = small_project(tmp_path, index=[
        text('::: {.callout-tip title="Mind"}\nThe $\\lambda$ gap.\n:::\n\n::: {.callout-warning}\n## Or not\nStay.\n:::'),
        text('![A picture](images/x.png){fig-align="center" fig-alt="so so" width=40px}'),
        code('#| echo: false\n1+1', 'echoed'), code('#| code-fold: true\n2+2', 'folded'), code('#| exports\n3+3', 'shown'),
        text('[there](wing/01_more.ipynb#k-and-v2.0-now), `_version`')],
        **{'02_near': [text('[far](wing/01_more.ipynb), `Arch`')], 'wing/01_more': [
            text('## K, and `v2.0`: now!'), text('$$\\begin{aligned}a&=\\log b\\\\c&=d\\end{aligned}$$'), text('costs $5 or $6'),
            text('[near](../02_near.ipynb), ![](../images/x.png)')]})
    shutil.copy(root/'nbs/images/report.png', proj/'nbs/images/x.png')
    res = run(proj)
    assert res.returncode == 0, res.stderr
    index,near,more = (soup(proj/f'_docs/{f}.html').article for f in ('index', '02_near', 'wing/01_more'))
    assert [t.text for t in index.select('div.admonition > .admonition-title')] == ['Mind', 'Or not'] and index.select('div.tip')
    assert '1+1' not in index.text and 'echoed' in index.text and '2+2' in index.details.text
    assert '3+3' in index.text and '3+3' not in index.details.text and 'Exported source' not in index.text
    assert index.img['alt'] == 'A picture' and '40px' in index.img['style']
    assert index.find('a', string='there')['href'].startswith('wing/01_more.html#')
    assert near.find('a', string='far')['href'] == 'wing/01_more.html' and more.find('a', string='near')['href'] == '../02_near.html'
    assert not index.select('a code'), 'a private name was linked'
    assert len(more.select('math')) == 1 and len(more.select('mtr')) == 2 and 'costs $5 or $6' in more.text
    assert list(problems(proj/'_docs')) == []

def test_a_fault_ends_the_build(tmp_path):
    res = run(small_project(tmp_path, index=[text(fault) for fault in ('[gone](00_gone.ipynb)', '![](images/gone.png)', '::: {.wide}\nx\n:::', '$\\nosuchthing$')]))
    assert res.returncode != 0 and not (tmp_path/'_docs').exists()
    for told in '00_gone.ipynb', 'gone.png', '.wide', 'nosuchthing': assert told in res.stderr

def test_directives_and_names_of_pages():
    docs = tool()
    assert docs.convert(dict(metadata={}, **code('#| echo: false\n1')))['metadata'] == dict(tags=['remove-input'])
    with pytest.raises(ValueError, match='fig-cap: x'): docs.convert(dict(metadata={}, **code('#| fig-cap: x\n1')))
    pages = {'index.ipynb': 'index.html', '10_lowrank.ipynb': 'lowrank.html', 'study/47_bench.ipynb': 'study/bench.html'}
    assert {f: docs.page_of(f) for f in pages} == pages

@pytest.fixture(scope='module')
def browser(tmp_path_factory):
    res = Browser(tmp_path_factory.mktemp('profile'))
    yield res
    res.close()

def complaints(browser):
    "Errors in the console, and requests that leave the machine"
    console = [e for e in browser.of('Runtime.consoleAPICalled') if e['type'] not in ('log', 'info')] + browser.of('Runtime.exceptionThrown', 'Log.entryAdded')
    return console + [e['request']['url'] for e in browser.of('Network.requestWillBeSent') if not e['request']['url'].startswith(('file:', 'data:'))]

def until(browser, expression, seconds=20):
    "Wait for JavaScript `expression` to become true; between two pages there is nothing to ask"
    for _ in range(seconds*20):
        with contextlib.suppress(AssertionError):
            if browser.js(expression): return
        time.sleep(0.05)
    pytest.fail(f'waited in vain for {expression}')

@needs_browser
def test_search_in_the_browser(browser, site):
    browser.open(site/'index.html')
    browser.js('document.querySelector(".bd-sidebar-primary .search-button__button").click()')
    until(browser, 'document.activeElement.type == "search"')
    browser('Input.insertText', text='simplex')
    for kind in 'keyDown', 'keyUp': browser('Input.dispatchKeyEvent', type=kind, key='Enter', code='Enter', windowsVirtualKeyCode=13, text='\r')
    until(browser, 'location.pathname.endsWith("search.html") && !!document.querySelector("#search-results a[href*=simplex]")')
    browser.js('document.querySelector("#search-results a[href*=simplex]").click()')
    until(browser, 'location.pathname.endsWith("simplex.html") && document.readyState == "complete"')
    assert browser.js('[...document.querySelectorAll("article math")].every(m => m.getBoundingClientRect().width > 3 && m.getBoundingClientRect().height > 3)')
    assert browser.js('document.querySelectorAll("article .formula math").length') > 0
    assert browser.js('document.querySelectorAll("article .cell_output img").length') > 0
    assert browser.js('[...document.images].every(i => i.complete && i.naturalWidth > 0)')
    assert complaints(browser) == []

squeezed = """[...document.querySelectorAll("article img")]
    .filter(i => !i.naturalWidth || Math.abs(i.width*i.naturalHeight/(i.height*i.naturalWidth) - 1) > 0.03).map(i => i.alt)"""

@needs_browser
def test_no_page_is_wider_than_a_phone(browser, site):
    "Nor are pictures squeezed to fit"
    browser('Emulation.setScriptExecutionDisabled', value=True)               # twice as fast
    try:
        for page in pages(site):
            browser.open(page, width=400)
            assert browser.js('document.documentElement.scrollWidth') == 400, name_of(site, page)
            assert browser.js(squeezed) == [], name_of(site, page)
            assert complaints(browser) == [], name_of(site, page)
    finally: browser('Emulation.setScriptExecutionDisabled', value=False)

@needs_browser
def test_formulas_fit_beside_the_sidebar(browser, site):
    cut = '[...document.querySelectorAll("article .formula")].filter(f => f.scrollWidth > f.clientWidth + 1).length'
    for page in pages(site):
        if not soup(page).select('article .formula'): continue
        browser.open(page, width=1280)
        assert browser.js(cut) == 0, name_of(site, page)

@needs_browser
@pytest.mark.parametrize('width', [1200, 400])
@pytest.mark.parametrize('dark', [False, True])
def test_light_and_dark(browser, site, width, dark):
    browser.open(site/'index.html', width, dark)
    r,g,b = map(int, re.findall(r'\d+', browser.js('getComputedStyle(document.body).backgroundColor'))[:3])
    assert (r + g + b < 150) == dark
    assert browser.js('document.documentElement.scrollWidth') == width
    assert complaints(browser) == []

@needs_browser
def test_no_bright_slabs_in_the_dark(browser, site):
    "The theme puts HTML that is not a data frame, and pictures, on a bright ground"
    browser.open(site/'43_elastic.html', dark=True)
    grounds = browser.js('[...document.querySelectorAll("article .output.text_html")].map(e => getComputedStyle(e).backgroundColor)')
    assert len(grounds) > 1 and set(grounds) == {'rgba(0, 0, 0, 0)'}
    browser.open(site/'index.html', dark=True)
    pictures = browser.js('[...document.querySelectorAll("article img:not([src$=svg])")].map(i => getComputedStyle(i)).map(s => [s.backgroundColor, s.padding, s.filter])')
    assert len(pictures) > 2 and {tuple(p) for p in pictures} == {('rgba(0, 0, 0, 0)', '0px', 'invert(0.9) hue-rotate(180deg)')}

@needs_browser
def test_the_browser_would_have_told(browser, tmp_path):
    (tmp_path/'bad.html').write_text('<img src="http://localhost:9/x.png"><p style="width:900px">wide</p><script>console.error("oh"); nothing()</script>')
    browser.open(tmp_path/'bad.html', width=400)
    until(browser, 'document.readyState == "complete"')
    assert browser.js('document.documentElement.scrollWidth') > 400
    assert 'http://localhost:9/x.png' in complaints(browser) and len(complaints(browser)) >= 3
