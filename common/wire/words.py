"""The enumerations of the wire in the project's own words."""

from splitveil.common.run.splits import SplitName
from splitveil.protos import split_learning_pb2 as pb

SPLIT_ON_WIRE: dict[SplitName, pb.Split] = {
    "train": pb.SPLIT_TRAIN,
    "validation": pb.SPLIT_VALIDATION,
    "test": pb.SPLIT_TEST,
}
