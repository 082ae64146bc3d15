import warnings

warnings.filterwarnings('ignore', message='.*torch.jit.script', category=FutureWarning)     # of fastai, at its import

__version__ = "0.1.0"
