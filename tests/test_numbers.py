"Half precision, batches of one, channels, classes, widths and operations as they should not be: it works, or is refused before long."
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from fastai.callback.core import Callback
from fastai.callback.training import GradientClip
from fastai.data.core import DataLoaders
from fastai.losses import CrossEntropyLossFlat
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from kshot_nas.cost import CostTable
from kshot_nas.learner import kshot_learner
from kshot_nas.rank import kendall_tau, rank_report
from kshot_nas.space import Arch
from kshot_nas.supernet import OpChoice, Supernet, WidthChoice
from kshot_nas.tiny import tiny_supernet

pytestmark = pytest.mark.usefixtures('one_thread')

X,Y = load_digits(return_X_y=True)
X,Y = torch.tensor(X).float().view(-1,1,8,8)/8-1,torch.tensor(Y)

def data(x=X, y=Y, n=48, n_valid=40, bs=16, valid_bs=None, classes=10):
    dls = DataLoaders.from_dsets(*([*zip(x[s], y[s])] for s in (slice(n), slice(n, n+n_valid))), bs=bs, num_workers=0, device='cpu', drop_last=False)
    if valid_bs: dls.loaders[1] = dls.valid.new(bs=valid_bs)
    dls.c = classes
    return dls

def learner(dls=None, net=tiny_supernet, **kwargs):
    return kshot_learner(data() if dls is None else dls, net, **{**dict(k=2, warmup=0, n_paths=4, loss_func=CrossEntropyLossFlat()), **({} if isinstance(net, Supernet) else dict(nf=4)), **kwargs})

def fit(learn, n_epoch=2, **kwargs):
    with learn.no_bar(), learn.no_logging(): learn.fit_kshot(n_epoch, lr=0.05, **kwargs)
    return learn

def works(learn, n_archs=3):
    "Trained or not, `learn` has finite weights, codes on the simplex, and evaluates as the plain networks do"
    assert all(p.isfinite().all() for p in learn.model.parameters())
    for arch in learn.space.sample(n_archs, seed=1):
        lam = learn.code(arch)
        assert (lam >= 0).all() and abs(lam.sum() - 1) < 1e-5
        plain,batches = learn.net.subnet(arch, lam).train(),learn.batches(1)
        with torch.no_grad(): loss = sum(F.cross_entropy(plain(x), y, reduction='sum') for x,y in batches)/sum(len(y) for _,y in batches)
        got = learn.eval_arch(arch)
        assert got['loss'] == pytest.approx(loss.item(), abs=2e-4) and 0 <= got['accuracy'] <= 1
    return learn

class Same(Callback):
    "All images of a batch are the same"
    order = -100
    def before_batch(self): self.learn.xb = (self.xb[0][:1].expand_as(self.xb[0]),)

class Half(Callback):
    "Autocast on a CPU"
    order = -1
    def __init__(self, dtype): self.dtype = dtype
    def before_batch(self): self.cast = torch.autocast('cpu', dtype=self.dtype); self.cast.__enter__()
    def after_pred(self): self.learn.pred = self.pred.float()
    def after_loss(self): self.cast.__exit__(None, None, None)

# Precision ----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('joint', [False, True], ids=['in turn', 'joint'])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype, joint):
    learn,whole = (fit(learner(widths=True, joint=joint), cbs=cbs) for cbs in ([Half(dtype)], []))
    assert {s[1] for s in learn.code_recorder.steps} == ({'both'} if joint else {'items', 'codes'})
    for a,b in zip(learn.code_recorder.steps, whole.code_recorder.steps): assert a[:2] == b[:2] and a[2] == pytest.approx(b[2], abs=0.1)
    assert {p.dtype for p in learn.model.parameters()} == {torch.float32}
    arch = learn.space.sample(1, seed=0)[0]
    with torch.autocast('cpu', dtype=dtype): half,lam = learn.eval_arch(arch),learn.code(arch)
    assert lam.dtype == torch.float32 and half['loss'] == pytest.approx(learn.eval_arch(arch)['loss'], abs=0.05)
    works(learn)

# Batches ------------------------------------------------------------------------------------------------------------------------

def test_batches_without_variance(): works(fit(learner(widths=True), cbs=Same()))
def test_images_without_variance(): works(fit(learner(data(torch.zeros(100, 1, 8, 8)))))
def test_one_image_per_path():
    learn = fit(learner(data(bs=4), n_paths=16, widths=True))
    assert len(learn.path_sampler.archs) == 16                                            # more than images: the first ones get one each
    works(learn)

def test_classes_missing_in_a_batch():
    order = Y[:88].argsort(stable=True)                                                   # the last classes are only in validation
    works(fit(learner(data(X[order], Y[order]))))
    works(fit(learner(data(y=Y*0))))                                                      # one class is all there is

def pooled(k=2): return Supernet(nn.Sequential(OpChoice({'a': nn.Conv2d(1, 4, 3), 'b': nn.Conv2d(1, 4, 3, bias=False)}), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 10)), k, in_shape=(1, 8, 8))

def test_norm_of_a_single_value():
    net = pooled()
    assert net(X[:2]).isfinite().all()
    for mode in net.train, net.eval:
        with pytest.raises(ValueError, match='a single value per channel.*at least 2 images'): mode()(X[:1])
    with pytest.raises(ValueError, match='n_paths'): fit(learner(data(bs=4), pooled(), n_paths=4))

def test_evaluation_in_batches_of_one():
    arch = Arch((0,1,2,3,0))
    learn = learner(data(valid_bs=1))
    with pytest.raises(ValueError, match="larger `bs` for validation, or stats='train'"): learn.eval_arch(arch)
    with pytest.raises(RuntimeError, match='larger `bs`'): learn.search(pop=4, gens=1, progress=False)
    assert learn.eval_arch(arch, stats='train')['loss'] == pytest.approx(learner().eval_arch(arch, stats='train')['loss'], abs=1e-4)
    norms = Supernet(nn.Sequential(OpChoice({'a': nn.Conv2d(1, 4, 3), 'b': nn.Conv2d(1, 4, 3)}), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(4), nn.Linear(4, 10)), 2, in_shape=(1, 8, 8))
    works(learner(data(valid_bs=1), norms), 1)                                            # nothing in it looks at other images

def test_no_last_batch_of_one():
    learn = works(learner(data(n_valid=33)))
    assert [len(y) for _,y in learn.batches(1)] == [17, 16]
    works(learner(data(n_valid=33), pooled()))
    assert [len(y) for _,y in learner(data(n_valid=1)).batches(1)] == [1]          # one image is one image

# Sizes --------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('k', [1, 32])
def test_few_and_many_items(k):
    learn = works(fit(learner(k=k, widths=True)))
    assert {s[1] for s in learn.code_recorder.steps} == ({'items'} if k == 1 else {'items', 'codes'})

def test_a_single_operation():
    net = Supernet(nn.Sequential(OpChoice({'only': nn.Conv2d(1, 4, 3)}), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)), 2, in_shape=(1, 8, 8))
    learn = works(fit(learner(data(), net)))
    assert learn.space.size == 1
    found = learn.search(pop=4, gens=2, progress=False)
    assert len(found.history) == 1 and found.best == Arch((0,)) == learn.space.mutate(found.best, seed=0)
    assert CostTable(net).sample_under(2, max_flops=1e9, seed=0) == [found.best]*2

def same_channels(k=2, n_in=1, n_out=10, size=8):
    cut = WidthChoice((0.1, 0.2, 0.3, 1.0))
    return Supernet(nn.Sequential(cut(nn.Conv2d(n_in, 4, 3)), nn.BatchNorm2d(4), OpChoice({'a': nn.Conv2d(4, 4, 1), 'b': nn.Conv2d(4, 4, 3, padding=1)}), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, n_out)), k, in_shape=(n_in, size, size))

@pytest.mark.parametrize('make', [same_channels, partial(tiny_supernet, widths=True, nf=1), partial(tiny_supernet, widths=True, nf=2)], ids=['first three alike', 'one channel', 'two channels'])
def test_widths_of_the_same_channels(make):
    net = make(k=2)
    table,archs = CostTable(net),net.space.sample(12, seed=0)
    for arch,flops,params in zip(archs, table.flops(archs).tolist(), table.params(archs).tolist()):
        plain = net.subnet(arch, weights='fresh').eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad(): plain(X[:1])
        assert (counter.get_total_flops()//2, sum(p.numel() for p in plain.parameters())) == (flops, params)
        assert torch.allclose(net.use(arch)(X[:4]), net.subnet(arch).train()(X[:4]), atol=1e-5)

@pytest.mark.parametrize('channels', [1, 5])
def test_channels(channels):
    learn = works(fit(learner(data(X.repeat(1, channels, 1, 1)))))
    assert learn.net.in_shape == (channels, 8, 8) and learn.subnet(learn.space.sample(1, seed=0)[0])[0].in_channels == channels

def test_another_number_of_channels_or_size():
    with pytest.raises(ValueError, match=r'made for inputs of shape \(3, 8, 8\).*those of the data have \(1, 8, 8\)'): learner(data(), tiny_supernet(k=2, n_in=3))
    with pytest.raises(ValueError, match=r'made for inputs of shape \(1, 16, 16\)'): learner(data(), tiny_supernet(k=2, size=16))
    with pytest.raises(ValueError, match=r'float inputs of shape \(3, 8, 8\); got'): tiny_supernet(k=2, n_in=3)(X[:2])
    with pytest.raises(TypeError, match='torch.float64'): learner(data(X.double()))
    learn = learner()
    learn.dls = data(F.interpolate(X, size=16))                                           # larger images later on are fine, if one means it
    works(fit(learn))

# Operations ---------------------------------------------------------------------------------------------------------------------

def odd_one(in_shape, **kw): return Supernet(nn.Sequential(nn.Conv2d(1, 4, 3), OpChoice({'same': nn.Conv2d(4, 4, 1), 'fewer': nn.Conv2d(4, 2, 1)}), nn.Conv2d(4, 4, 1)), 2, in_shape=in_shape, **kw)

def test_an_operation_of_another_shape():
    with pytest.raises(ValueError, match=r"same shape; got \{'same': \(4, 6, 6\), 'fewer': \(2, 6, 6\)\}"): odd_one((1, 8, 8))
    with pytest.raises(ValueError, match=r'\(FLOPs, params\) \(\d+, \d+\), the table says \(\d+, \d+\)'): CostTable(odd_one(None), (1, 8, 8))   # plain numbers

def test_an_operation_that_needs_content():
    class Picky(nn.Module):
        def forward(self, x): return x*float(x.mean())                                    # can't be done without
    net = Supernet(nn.Sequential(OpChoice({'a': Picky(), 'b': nn.Identity()}), nn.Flatten(), nn.Linear(64, 10)), 2, in_shape=(1, 8, 8))
    assert net.use(Arch((0,)))(X[:2]).isfinite().all()

# Data ---------------------------------------------------------------------------------------------------------------------------

def test_duplicates():
    learn,archs = learner(),[Arch((0,1,2,3,0)), Arch((0,)*5), Arch((0,1,2,3,0)), Arch((1,)*5)]
    df = learn.eval_archs(archs, progress=False)
    assert df.index.tolist() == archs and df.iloc[0].equals(df.iloc[2])
    for f in kendall_tau, rank_report:
        with pytest.raises(ValueError, match=r'`pred` has a key more than once: 0-1-2-3-0. Count every architecture once, such as by `x\[~x.index.duplicated\(\)\]`'): f(df.loss, df.loss)
    once = df.loss[~df.index.duplicated()]
    assert kendall_tau(once, once) == 1

def test_no_validation_images():
    learn = learner(data(n_valid=0))
    for f in (lambda: learn.eval_arch(Arch((0,)*5))), (lambda: learn.search(pop=4, gens=1, progress=False)):
        with pytest.raises(ValueError, match='no images to evaluate on'): f()

def test_images_that_are_not_numbers():
    x = X.clone()
    x[60,0,3,3] = float('nan')
    with pytest.raises(ValueError, match='NaN or infinite values in the images to evaluate on'): learner(data(x)).eval_arch(Arch((0,)*5))
    x[3] = float('inf')
    with pytest.raises(FloatingPointError, match='is there a NaN in the data'): fit(learner(data(x)))

def test_weights_that_are_not_numbers():
    learn = learner()
    with torch.no_grad(): learn.net.net[0].theta.fill_(float('nan'))
    res = learn.eval_archs([Arch((0,)*5), Arch((1,)*5)], progress=False)
    assert res.isna().all().all()                                                         # not the accuracy of always guessing the first class
    with pytest.raises(ValueError, match='not finite at 0-0-0-0-0'): kendall_tau(res.accuracy, [1, 2])

@pytest.mark.parametrize('shift', [5, -1])
def test_classes_out_of_range(shift):
    with pytest.raises(ValueError, match='but the network has 10 outputs, for classes 0 to 9'): fit(learner(data(y=Y+shift)))
    y = Y.clone(); y[50] = 12                                                             # only one, only in validation
    with pytest.raises(ValueError, match='an image of class 12'): fit(learner(data(y=y)))

def test_clipped_gradients():
    "The gradient of K items is longer than that of one, so that a clip of 1 would throttle; the advice says 10"
    class Norm(Callback):
        order,norms = 200,()
        def before_step(self): self.norms = [*self.norms, sum(p.grad.square().sum() for p in self.learn.net.parameters() if p.grad is not None).sqrt().item()] if self.learn.phase == 'items' else self.norms
    free,clipped = Norm(),Norm()
    fit(learner(k=8), cbs=free); fit(learner(k=8), cbs=[clipped, GradientClip(1.)])
    assert max(clipped.norms) < 1.01 and min(free.norms) > 2
    with pytest.raises(FloatingPointError, match=r'GradientClip\(10\.\)'): fit(learner(data(X*float('inf'))))
