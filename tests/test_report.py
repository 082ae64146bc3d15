"The report in a real browser: headless Chromium, spoken to over a pipe with the DevTools protocol."
import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from kshot_nas.app.report import write_report
from kshot_nas.cost import CostTable
from kshot_nas.problem import ArchProblem, landscape
from kshot_nas.search import search
from kshot_nas.tiny import tiny_supernet

chromium = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome', 'chrome'))), None)
needs_browser = pytest.mark.skipif(chromium is None, reason='there is no Chromium on this machine')

class Browser:
    "Headless Chromium with one page; remembers every event"
    def __init__(self, profile):
        theirs_in,self.out = os.pipe()
        self.inp,theirs_out = os.pipe()
        args = [chromium, '--headless=new', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--no-first-run', '--hide-scrollbars',
                '--remote-debugging-pipe', f'--user-data-dir={profile}', 'about:blank']
        swap = f'import os,sys; i,o = os.dup({theirs_in}),os.dup({theirs_out}); os.dup2(i, 13); os.dup2(o, 14); os.dup2(13, 3); os.dup2(14, 4); os.execv(sys.argv[1], sys.argv[1:])'     # it wants numbers 3 and 4
        self.proc = subprocess.Popen([sys.executable, '-c', swap, *args], pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(theirs_in); os.close(theirs_out)
        self.n,self.events,self.buffer,self.session = 0,[],b'',None
        page = next(t for t in self('Target.getTargets')['targetInfos'] if t['type'] == 'page')
        self.session = self('Target.attachToTarget', targetId=page['targetId'], flatten=True)['sessionId']
        for domain in 'Page', 'Runtime', 'Log', 'Network': self(f'{domain}.enable')

    def _message(self):
        while b'\0' not in self.buffer:
            if not (more := os.read(self.inp, 2**16)): raise EOFError('the browser is gone')
            self.buffer += more
        message,_,self.buffer = self.buffer.partition(b'\0')
        return json.loads(message)

    def __call__(self, method, **params):
        self.n += 1
        message = dict(id=self.n, method=method, params=params, **({'sessionId': self.session} if self.session else {}))
        os.write(self.out, json.dumps(message).encode() + b'\0')
        while (answer := self._message()).get('id') != self.n: self.events.append(answer)
        assert 'error' not in answer, answer
        return answer['result']

    def wait(self, event):
        while not any(e['method'] == event for e in self.events): self.events.append(self._message())

    def open(self, path, width=1200, dark=False):
        "Open a file, as wide and as dark as asked for"
        self.events = []
        self('Emulation.setDeviceMetricsOverride', width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        self('Emulation.setEmulatedMedia', features=[dict(name='prefers-color-scheme', value='dark' if dark else 'light')])
        self('Page.navigate', url=Path(path).absolute().as_uri())
        self.wait('Page.loadEventFired')

    def js(self, expression): return self('Runtime.evaluate', expression=expression, returnByValue=True)['result'].get('value')
    def of(self, *methods): return [e['params'] for e in self.events if e['method'] in methods]
    def screenshot(self, path, height=900):
        self('Emulation.setDeviceMetricsOverride', width=self.js('innerWidth'), height=height, deviceScaleFactor=1, mobile=False)
        Path(path).write_bytes(base64.b64decode(self('Page.captureScreenshot', format='png')['data']))
    def close(self):
        with contextlib.suppress(OSError, EOFError, AssertionError): self.session = None; self('Browser.close')
        try: self.proc.wait(10)
        except subprocess.TimeoutExpired: self.proc.kill(); self.proc.wait()
        os.close(self.inp); os.close(self.out)

@pytest.fixture(scope='module')
def browser(tmp_path_factory):
    res = Browser(tmp_path_factory.mktemp('profile'))
    yield res
    res.close()

def finals(archs):
    "The rows of `results.csv` and the curves of finals between two architectures"
    rows = pd.DataFrame(dict(stage='finals', arch=archs, role=['finalist', 'random'], round=1, n_epoch=3, seed=0, flops=1000, params=99, accuracy=0.5, retrained=[0.9, 0.8], kept=True))
    return rows,pd.DataFrame([dict(arch=a, n_epoch=3, seed=0, epoch=e, accuracy=0.2*e) for a in archs for e in (1, 2, 3)])

best = json.dumps(dict(files=['model.pt', 'model.onnx', 'use.py'], accuracy=dict(file=0.9123)))
evil = '"><img src=x onerror=alert(1)><script>alert(2)</script>'

@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "The folder of a run that never took place, with names that mean harm"
    res,net,rng = tmp_path_factory.mktemp('run'),tiny_supernet(k=1, widths=True),np.random.default_rng(0)
    table,accuracy = CostTable(net),landscape(net.space)
    result = search(ArchProblem(net.space, accuracy, table), max_flops=3e5, pop=10, gens=4, progress=False)
    some = table.sample_under(30, max_flops=3e5, seed=0)
    def rows(stage, archs, **columns): return pd.DataFrame(dict(stage=stage, arch=[str(a) for a in archs], flops=table.flops(archs), params=table.params(archs), accuracy=[accuracy(a) for a in archs], **columns))
    final,curves = finals([str(result.best), str(some[0])])
    curves.to_csv(res/'finals.csv', index=False)
    (res/'best.json').write_text(best)
    pd.concat([rows('rank', some, truth=rng.random(30)), rows('search', result.history.arch, generation=result.history.generation), final,
               rows('retrain', [result.best, some[0]], role=['winner', 'random'], seed=0, retrained=[0.9123, 0.8771])]).to_csv(res/'results.csv', index=False)
    pd.DataFrame([(e, p, rng.random(), 0.1) for e in range(3) for p in ('items', 'codes') for _ in range(5)], columns=['epoch', 'phase', 'loss', 'r_c']).to_csv(res/'training.csv', index=False)
    np.save(res/'codes.npy', rng.dirichlet([5]*4, (3, 20)))
    (res/'config.json').write_text(json.dumps(dict(
        settings=dict(data=f'/data/{evil}', space='tiny', k=4, max_flops=300000, seed=0), command=f'kshot_search --out {evil}', function='kshot_nas.tiny:tiny_supernet', space=json.loads(net.space.to_json()), flops_range=table.flops_range(),
        data=dict(name=evil, train=100, valid=50, test=0, classes=['cat', evil], shape=[1,8,8]), versions=dict(torch='0'))))
    write_report(res)
    return res

@needs_browser
@pytest.mark.parametrize('width', [1200, 400])
@pytest.mark.parametrize('dark', [False, True])
def test_opens_without_complaint(browser, folder, width, dark):
    browser.open(folder/'report.html', width, dark)
    assert browser.of('Runtime.exceptionThrown', 'Runtime.consoleAPICalled', 'Log.entryAdded', 'Page.javascriptDialogOpening') == []
    urls = [e['request']['url'] for e in browser.of('Network.requestWillBeSent') if not e['request']['url'].startswith('data:')]
    assert len(urls) == 1 and urls[0].startswith('file:'), 'the page asks for something besides itself'
    assert browser.js('document.documentElement.scrollWidth') <= width, 'the page is wider than the screen'
    assert browser.js('document.querySelectorAll("svg").length') == 7
    assert min(browser.js('[...document.querySelectorAll("svg")].map(s => s.getBoundingClientRect().height)')) > 80
    r,g,b = map(int, re.findall(r'\d+', browser.js('getComputedStyle(document.body).backgroundColor'))[:3])
    assert (r + g + b < 150) == dark

@needs_browser
def test_numbers_are_those_of_the_results(browser, folder):
    browser.open(folder/'report.html')
    cells = browser.js('[...document.querySelectorAll("tr")].map(r => [...r.children].map(c => c.textContent))')
    rows,results = {tuple(c) for c in cells},pd.read_csv(folder/'results.csv')
    for r in results[results.stage == 'search'].itertuples(): assert (r.arch, f'{r.accuracy:.4f}', f'{r.flops:,}', f'{r.params:,}', f'{r.generation:.0f}') in rows
    for r in results[results.stage == 'rank'].itertuples(): assert (r.arch, f'{r.accuracy:.4f}', f'{r.truth:.4f}', f'{r.flops:,}', f'{r.params:,}') in rows
    for r in results[results.stage == 'retrain'].itertuples(): assert (r.role, r.arch, '0', f'{r.flops:,}', f'{r.params:,}', f'{r.accuracy:.4f}', f'{r.retrained:.4f}') in rows
    assert '91.2%' in browser.js('document.querySelector(".tiles").textContent') and '87.7%' in browser.js('document.querySelector(".lead").textContent')

@needs_browser
def test_names_are_text(browser, folder):
    browser.open(folder/'report.html')
    assert browser.js('document.querySelectorAll("script, img, iframe, object, link").length') == 0
    assert evil in browser.js('document.querySelector("h1").textContent')
    assert browser.js('document.querySelector("pre:last-of-type").textContent') == f'kshot_search --out {evil}'
    assert f'cat, {evil}' in browser.js('document.body.textContent')

policy = """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">"""

def test_page_without_a_browser(folder):
    "The policy comes before all that it is to rule, and names are text."
    page = (folder/'report.html').read_text(encoding='utf-8')
    assert page.startswith(f'<!doctype html><html lang="en"><head><meta charset="utf-8">{policy}')
    assert not re.search('<script|<img|<iframe|<object|<link', page) and evil.replace('&', '&amp;').replace('<', '&lt;').replace('>', '&gt;') in page

@needs_browser
def test_policy_stops_scripts(browser, folder, tmp_path):
    page = (folder/'report.html').read_text(encoding='utf-8').replace('</body>', '<script>document.title = "harm"</script></body>')
    for text,harmed in (page, False),(page.replace(policy, ''), True):
        (tmp_path/'page.html').write_text(text, encoding='utf-8')
        browser.open(tmp_path/'page.html')
        assert (browser.js('document.title') == 'harm') == harmed

@needs_browser
def test_the_browser_would_have_told(browser, tmp_path):
    "The tests above can fail: a page that asks for a file and logs an error is noticed."
    (tmp_path/'bad.html').write_text('<img src="nowhere.png"><script>console.error("oh"); nothing()</script>')
    browser.open(tmp_path/'bad.html')
    assert browser.of('Runtime.exceptionThrown') and browser.of('Runtime.consoleAPICalled')
    assert len(browser.of('Network.requestWillBeSent')) == 2

# A report of many points ------------------------------------------------------------------------------------------------------

def test_report_of_many_points(tmp_path):
    net,rng,n = tiny_supernet(k=1, widths=True),np.random.default_rng(0),50_000
    table,accuracy = CostTable(net),landscape(net.space)
    archs = list(dict.fromkeys(net.space.sample(2*n, seed=0)))[:n]
    costs = dict(flops=table.flops(archs), params=table.params(archs))
    seen = pd.DataFrame(dict(arch=list(map(str, archs)), **costs, accuracy=[accuracy(a) for a in archs], generation=np.arange(n)//50))
    parts = dict(rank=seen[:10_000].assign(truth=rng.random(10_000)), search=seen,
                 retrain=seen[:2].assign(role=['winner', 'random'], seed=0, retrained=0.9))
    final,curves = finals(seen.arch[:2])
    curves.to_csv(tmp_path/'finals.csv', index=False)
    (tmp_path/'best.json').write_text(best)
    pd.concat([*(d.assign(stage=s) for s,d in parts.items()), final]).to_csv(tmp_path/'results.csv', index=False)
    steps = pd.DataFrame([(i//500, ('items', 'codes')[i % 2], 1., 0.1) for i in range(n)], columns=['epoch', 'phase', 'loss', 'r_c'])
    steps.to_csv(tmp_path/'training.csv', index=False)
    np.save(tmp_path/'codes.npy', rng.dirichlet([5]*8, (100, 128)))
    (tmp_path/'config.json').write_text(json.dumps(dict(
        settings=dict(space='tiny', k=8, max_flops=10**6, seed=0), command='kshot_search', function='kshot_nas.tiny:tiny_supernet',
        space=json.loads(net.space.to_json()), flops_range=table.flops_range(), versions={},
        data=dict(name='many', train=1, valid=1, test=0, classes=['a', 'b'], shape=[1,8,8]))))
    start = time.process_time()
    page = write_report(tmp_path).read_text(encoding='utf-8')
    assert time.process_time()-start < 60
    assert len(page) < 3e6 and 'the first 1,000 of 50,000 rows' in page
    assert page.count('data:image/png') >= 3 and page.count('<svg') == 7
