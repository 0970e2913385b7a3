from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_FLOAT16: _ClassVar[DType]
    DTYPE_BFLOAT16: _ClassVar[DType]
    DTYPE_UINT8: _ClassVar[DType]

class Split(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPLIT_UNSPECIFIED: _ClassVar[Split]
    SPLIT_TRAIN: _ClassVar[Split]
    SPLIT_VALIDATION: _ClassVar[Split]
    SPLIT_TEST: _ClassVar[Split]
    SPLIT_ACTIVATIONS: _ClassVar[Split]
    SPLIT_LABELS: _ClassVar[Split]
    SPLIT_TRANSFER: _ClassVar[Split]
    SPLIT_SUMS: _ClassVar[Split]

class Course(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COURSE_UNSPECIFIED: _ClassVar[Course]
    COURSE_CONTINUE: _ClassVar[Course]
    COURSE_STOP: _ClassVar[Course]

class LeaveReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEAVE_REASON_UNSPECIFIED: _ClassVar[LeaveReason]
    LEAVE_REASON_FINISHED: _ClassVar[LeaveReason]
    LEAVE_REASON_INTERRUPTED: _ClassVar[LeaveReason]
    LEAVE_REASON_ALIGNMENT_FAILED: _ClassVar[LeaveReason]
    LEAVE_REASON_FAILED: _ClassVar[LeaveReason]
DTYPE_UNSPECIFIED: DType
DTYPE_FLOAT32: DType
DTYPE_FLOAT16: DType
DTYPE_BFLOAT16: DType
DTYPE_UINT8: DType
SPLIT_UNSPECIFIED: Split
SPLIT_TRAIN: Split
SPLIT_VALIDATION: Split
SPLIT_TEST: Split
SPLIT_ACTIVATIONS: Split
SPLIT_LABELS: Split
SPLIT_TRANSFER: Split
SPLIT_SUMS: Split
COURSE_UNSPECIFIED: Course
COURSE_CONTINUE: Course
COURSE_STOP: Course
LEAVE_REASON_UNSPECIFIED: LeaveReason
LEAVE_REASON_FINISHED: LeaveReason
LEAVE_REASON_INTERRUPTED: LeaveReason
LEAVE_REASON_ALIGNMENT_FAILED: LeaveReason
LEAVE_REASON_FAILED: LeaveReason

class HandshakeRequest(_message.Message):
    __slots__ = ("protocol_version", "party", "contract", "nonce_commitment", "resume_run_id", "resume_places")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PARTY_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    NONCE_COMMITMENT_FIELD_NUMBER: _ClassVar[int]
    RESUME_RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_PLACES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    party: str
    contract: str
    nonce_commitment: bytes
    resume_run_id: str
    resume_places: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, protocol_version: _Optional[int] = ..., party: _Optional[str] = ..., contract: _Optional[str] = ..., nonce_commitment: _Optional[bytes] = ..., resume_run_id: _Optional[str] = ..., resume_places: _Optional[_Iterable[int]] = ...) -> None: ...

class HandshakeReply(_message.Message):
    __slots__ = ("run_id", "contract_digest", "nonce", "resumes_at", "nonce_commitments")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    RESUMES_AT_FIELD_NUMBER: _ClassVar[int]
    NONCE_COMMITMENTS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    contract_digest: bytes
    nonce: bytes
    resumes_at: int
    nonce_commitments: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, run_id: _Optional[str] = ..., contract_digest: _Optional[bytes] = ..., nonce: _Optional[bytes] = ..., resumes_at: _Optional[int] = ..., nonce_commitments: _Optional[_Iterable[bytes]] = ...) -> None: ...

class AlignFrame(_message.Message):
    __slots__ = ("hello", "points", "tags", "done", "wait", "share", "commitment")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    COMMITMENT_FIELD_NUMBER: _ClassVar[int]
    hello: AlignHello
    points: MaskedPoints
    tags: Tags
    done: AlignDone
    wait: AlignWait
    share: AlignShare
    commitment: AlignCommitment
    def __init__(self, hello: _Optional[_Union[AlignHello, _Mapping]] = ..., points: _Optional[_Union[MaskedPoints, _Mapping]] = ..., tags: _Optional[_Union[Tags, _Mapping]] = ..., done: _Optional[_Union[AlignDone, _Mapping]] = ..., wait: _Optional[_Union[AlignWait, _Mapping]] = ..., share: _Optional[_Union[AlignShare, _Mapping]] = ..., commitment: _Optional[_Union[AlignCommitment, _Mapping]] = ...) -> None: ...

class AlignHello(_message.Message):
    __slots__ = ("engine", "version", "normalisation", "tag_bytes", "chunk_ids", "set_size", "nonce", "run_id", "resume")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NORMALISATION_FIELD_NUMBER: _ClassVar[int]
    TAG_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_IDS_FIELD_NUMBER: _ClassVar[int]
    SET_SIZE_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    engine: str
    version: int
    normalisation: str
    tag_bytes: int
    chunk_ids: int
    set_size: int
    nonce: bytes
    run_id: str
    resume: AlignResume
    def __init__(self, engine: _Optional[str] = ..., version: _Optional[int] = ..., normalisation: _Optional[str] = ..., tag_bytes: _Optional[int] = ..., chunk_ids: _Optional[int] = ..., set_size: _Optional[int] = ..., nonce: _Optional[bytes] = ..., run_id: _Optional[str] = ..., resume: _Optional[_Union[AlignResume, _Mapping]] = ...) -> None: ...

class AlignResume(_message.Message):
    __slots__ = ("exchange", "points", "points_digest", "tags", "bucket")
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    POINTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    exchange: bytes
    points: int
    points_digest: bytes
    tags: int
    bucket: int
    def __init__(self, exchange: _Optional[bytes] = ..., points: _Optional[int] = ..., points_digest: _Optional[bytes] = ..., tags: _Optional[int] = ..., bucket: _Optional[int] = ...) -> None: ...

class MaskedPoints(_message.Message):
    __slots__ = ("chunk", "points")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    chunk: int
    points: bytes
    def __init__(self, chunk: _Optional[int] = ..., points: _Optional[bytes] = ...) -> None: ...

class AlignCommitment(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    def __init__(self, digest: _Optional[bytes] = ...) -> None: ...

class Tags(_message.Message):
    __slots__ = ("chunk", "tags")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    chunk: int
    tags: bytes
    def __init__(self, chunk: _Optional[int] = ..., tags: _Optional[bytes] = ...) -> None: ...

class AlignDone(_message.Message):
    __slots__ = ("count", "digest", "split_digest")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SPLIT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    count: int
    digest: bytes
    split_digest: bytes
    def __init__(self, count: _Optional[int] = ..., digest: _Optional[bytes] = ..., split_digest: _Optional[bytes] = ...) -> None: ...

class AlignWait(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AlignShare(_message.Message):
    __slots__ = ("chunk", "mask", "nonces")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    NONCES_FIELD_NUMBER: _ClassVar[int]
    chunk: int
    mask: bytes
    nonces: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, chunk: _Optional[int] = ..., mask: _Optional[bytes] = ..., nonces: _Optional[_Iterable[bytes]] = ...) -> None: ...

class TensorFrame(_message.Message):
    __slots__ = ("run_id", "epoch", "step", "rows", "rows_digest", "split", "dtype", "shape", "total_bytes", "offset", "data")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ROWS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    epoch: int
    step: int
    rows: int
    rows_digest: bytes
    split: Split
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    total_bytes: int
    offset: int
    data: bytes
    def __init__(self, run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., rows: _Optional[int] = ..., rows_digest: _Optional[bytes] = ..., split: _Optional[_Union[Split, str]] = ..., dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., total_bytes: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class EvaluateReply(_message.Message):
    __slots__ = ("epoch", "step", "course", "split")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    COURSE_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    course: Course
    split: Split
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., course: _Optional[_Union[Course, str]] = ..., split: _Optional[_Union[Split, str]] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("run_id", "reason")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    reason: LeaveReason
    def __init__(self, run_id: _Optional[str] = ..., reason: _Optional[_Union[LeaveReason, str]] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class IdForm(_message.Message):
    __slots__ = ("most", "some", "length", "hexadecimal", "leading_zeros", "decimal_point", "shortened")
    MOST_FIELD_NUMBER: _ClassVar[int]
    SOME_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    HEXADECIMAL_FIELD_NUMBER: _ClassVar[int]
    LEADING_ZEROS_FIELD_NUMBER: _ClassVar[int]
    DECIMAL_POINT_FIELD_NUMBER: _ClassVar[int]
    SHORTENED_FIELD_NUMBER: _ClassVar[int]
    most: str
    some: str
    length: int
    hexadecimal: bool
    leading_zeros: bool
    decimal_point: bool
    shortened: bool
    def __init__(self, most: _Optional[str] = ..., some: _Optional[str] = ..., length: _Optional[int] = ..., hexadecimal: _Optional[bool] = ..., leading_zeros: _Optional[bool] = ..., decimal_point: _Optional[bool] = ..., shortened: _Optional[bool] = ...) -> None: ...

class Introduction(_message.Message):
    __slots__ = ("protocol_version", "version", "party", "contract", "clock_ms", "id_form")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PARTY_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    CLOCK_MS_FIELD_NUMBER: _ClassVar[int]
    ID_FORM_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    version: str
    party: str
    contract: str
    clock_ms: int
    id_form: IdForm
    def __init__(self, protocol_version: _Optional[int] = ..., version: _Optional[str] = ..., party: _Optional[str] = ..., contract: _Optional[str] = ..., clock_ms: _Optional[int] = ..., id_form: _Optional[_Union[IdForm, _Mapping]] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("introduction", "padding")
    INTRODUCTION_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    introduction: Introduction
    padding: bytes
    def __init__(self, introduction: _Optional[_Union[Introduction, _Mapping]] = ..., padding: _Optional[bytes] = ...) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ("introduction", "padding")
    INTRODUCTION_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    introduction: Introduction
    padding: bytes
    def __init__(self, introduction: _Optional[_Union[Introduction, _Mapping]] = ..., padding: _Optional[bytes] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("protocol_version", "party", "contract")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PARTY_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    party: str
    contract: str
    def __init__(self, protocol_version: _Optional[int] = ..., party: _Optional[str] = ..., contract: _Optional[str] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("run_id", "batch_number", "max_ids")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_NUMBER_FIELD_NUMBER: _ClassVar[int]
    MAX_IDS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    batch_number: int
    max_ids: int
    def __init__(self, run_id: _Optional[str] = ..., batch_number: _Optional[int] = ..., max_ids: _Optional[int] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("number", "model_digest", "ids")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    model_digest: bytes
    ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, number: _Optional[int] = ..., model_digest: _Optional[bytes] = ..., ids: _Optional[_Iterable[str]] = ...) -> None: ...

class TableRequest(_message.Message):
    __slots__ = ("model_digest", "points", "last")
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    model_digest: bytes
    points: bytes
    last: bool
    def __init__(self, model_digest: _Optional[bytes] = ..., points: _Optional[bytes] = ..., last: _Optional[bool] = ...) -> None: ...

class TableReply(_message.Message):
    __slots__ = ("points", "tags", "sealed", "last")
    POINTS_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    points: bytes
    tags: bytes
    sealed: bytes
    last: bool
    def __init__(self, points: _Optional[bytes] = ..., tags: _Optional[bytes] = ..., sealed: _Optional[bytes] = ..., last: _Optional[bool] = ...) -> None: ...

class EmbedReply(_message.Message):
    __slots__ = ("number", "known", "dtype", "shape", "data")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    number: int
    known: bytes
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, number: _Optional[int] = ..., known: _Optional[bytes] = ..., dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...
