"Networks of timm, whose layers are its own: the supernet of each contains it, and its paths are plain networks."
import pytest
import torch

from kshot_nas.cost import CostTable
from kshot_nas.elastic import elastic_plan, elastic_space
from kshot_nas.space import Arch

timm = pytest.importorskip('timm', reason="timm is not installed: pip install 'kshot_nas[timm]'")

names = ['mobilenetv3_small_050', 'tf_efficientnet_lite0', 'convnext_atto', 'vit_tiny_patch16_224', 'resnet10t']

def worn(model, size):
    "`model` with no two channels alike and statistics in its norms"
    torch.manual_seed(0)
    for p in model.parameters():
        if p.std() == 0 or p.numel() == 1: torch.nn.init.uniform_(p, 0.5, 1.5)
    with torch.no_grad(): model.train()(torch.randn(4, 3, size, size))
    return model.eval()

@pytest.mark.parametrize('name', names)
def test_full_architecture_is_the_model(name, size=64):
    kwargs = dict(img_size=size) if name.startswith('vit') else {}
    model = worn(timm.create_model(name, num_classes=7, **kwargs), size)
    net = elastic_space(f'timm:{name}', model.state_dict())(k=2, n_out=7, size=size, running=True).eval()
    x,full = torch.randn(2, 3, size, size),Arch([0]*len(net.space.ops), [len(r)-1 for r in net.space.widths])
    with torch.no_grad():
        want,got = model(x),net.use(full)(x)
        assert (got - want).abs().max() <= 1e-4*want.abs().max()
        for arch in net.space.sample(2, seed=0):
            lam = torch.tensor([0.3, 0.7])
            want,got = net.subnet(arch, lam).eval()(x),net.use(arch, lam)(x)
            assert (got - want).abs().max() <= 1e-4*want.abs().max()
    assert CostTable(net).params([full]).item() == sum(p.numel() for p in model.parameters())

def test_plan_is_always_the_same():
    model = timm.create_model('mobilenetv3_small_050')
    a,b = (elastic_plan(model, (3, 64, 64)) for _ in range(2))
    assert (a.blocks, a.choices, a.left) == (b.blocks, b.choices, b.left) and a.blocks and a.choices

def test_unknown_network_is_named():
    with pytest.raises(ValueError, match="timm has no network 'resnet19'; it has"):
        elastic_space('timm:resnet19')
