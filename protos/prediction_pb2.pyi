from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Model(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODEL_UNSPECIFIED: _ClassVar[Model]
    MODEL_JOINT: _ClassVar[Model]
    MODEL_FALLBACK: _ClassVar[Model]
MODEL_UNSPECIFIED: Model
MODEL_JOINT: Model
MODEL_FALLBACK: Model

class PredictRequest(_message.Message):
    __slots__ = ("ids", "features")
    IDS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    features: _containers.RepeatedCompositeFieldContainer[Column]
    def __init__(self, ids: _Optional[_Iterable[str]] = ..., features: _Optional[_Iterable[_Union[Column, _Mapping]]] = ...) -> None: ...

class Column(_message.Message):
    __slots__ = ("name", "numbers", "texts")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    numbers: _containers.RepeatedScalarFieldContainer[float]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., numbers: _Optional[_Iterable[float]] = ..., texts: _Optional[_Iterable[str]] = ...) -> None: ...

class PredictReply(_message.Message):
    __slots__ = ("predictions", "classes", "run_id", "why_fallback")
    PREDICTIONS_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WHY_FALLBACK_FIELD_NUMBER: _ClassVar[int]
    predictions: _containers.RepeatedCompositeFieldContainer[Prediction]
    classes: _containers.RepeatedScalarFieldContainer[str]
    run_id: str
    why_fallback: str
    def __init__(self, predictions: _Optional[_Iterable[_Union[Prediction, _Mapping]]] = ..., classes: _Optional[_Iterable[str]] = ..., run_id: _Optional[str] = ..., why_fallback: _Optional[str] = ...) -> None: ...

class Prediction(_message.Message):
    __slots__ = ("model", "probabilities", "value")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    model: Model
    probabilities: _containers.RepeatedScalarFieldContainer[float]
    value: float
    def __init__(self, model: _Optional[_Union[Model, str]] = ..., probabilities: _Optional[_Iterable[float]] = ..., value: _Optional[float] = ...) -> None: ...
