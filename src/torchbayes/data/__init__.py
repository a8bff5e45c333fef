"""Data: readers, downloads, augmentation, and loaders whose randomness survives a restart."""

from torchbayes.core.batch import (
    Inputs,
    batch_len,
    call,
    slice_batch,
    split_batch,
    to_device,
)
from torchbayes.data.corruptions import CORRUPTIONS, corrupt
from torchbayes.data.dataset import DataSet, Split
from torchbayes.data.datasets import DATASETS, DataEntry, load_data, make_loader
from torchbayes.data.folder import ImageFolder
from torchbayes.data.foreign import ForeignLoader
from torchbayes.data.images import read_image
from torchbayes.data.loader import BatchLoader
from torchbayes.data.ood import OutOfDistribution, noise_for, ood_for
from torchbayes.data.preprocessing import Preprocessing
from torchbayes.data.source import DataError
from torchbayes.data.stream import StreamLoader
from torchbayes.data.table_encoding import TableEncoding
from torchbayes.data.transform import Chain, Normalise, PadCropFlip

__all__ = [
    "CORRUPTIONS",
    "DATASETS",
    "BatchLoader",
    "Chain",
    "DataEntry",
    "DataError",
    "DataSet",
    "ForeignLoader",
    "ImageFolder",
    "Inputs",
    "Normalise",
    "OutOfDistribution",
    "PadCropFlip",
    "Preprocessing",
    "Split",
    "StreamLoader",
    "TableEncoding",
    "batch_len",
    "call",
    "corrupt",
    "load_data",
    "make_loader",
    "noise_for",
    "ood_for",
    "read_image",
    "slice_batch",
    "split_batch",
    "to_device",
]
