"""The public names of `trouper`, imported at the first use."""

from trouper.actors.runtime.answer import Answer
from trouper.actors.runtime.channels import Health
from trouper.actors.runtime.model_manager import ModelManager
from trouper.actors.runtime.runtime import Runtime
from trouper.actors.runtime.served_models import Lease, ModelEntry
from trouper.process import prepare_process
from trouper.protocol.batch import BatchStats
from trouper.protocol.capabilities import Capabilities, SelfCheck
from trouper.protocol.grammar import FollowedGrammar, Grammar
from trouper.protocol.health import ChannelStats
from trouper.protocol.loading import Loading, LoadWatch
from trouper.protocol.logits_processor import LogitsProcessor
from trouper.protocol.media import ImageSource
from trouper.protocol.model import (
    AdapterCard,
    AdapterPlan,
    Engine,
    MemoryStats,
    ModelCard,
    Tokenizer,
)
from trouper.protocol.model_options import ModelOptions
from trouper.protocol.problems import (
    ContextExcess,
    ModelUnusable,
    Problem,
    RequestFailed,
    SettingsInvalid,
)
from trouper.protocol.replies import (
    Accepted,
    Delta,
    Finished,
    TokenLogprobs,
)
from trouper.protocol.requests import (
    CacheScope,
    ChatPrompt,
    Generate,
    InfillPrompt,
    PairPrompt,
    TextPrompt,
    Timeouts,
    TokenPrompt,
)
from trouper.protocol.sampling import Sampling
from trouper.protocol.setting_fields import ByteSize
from trouper.protocol.settings import ServerSettings, Settings
from trouper.run import run_models, run_runtime
from trouper.storage.model_files import ModelFiles

__all__ = [
    "Accepted",
    "AdapterCard",
    "AdapterPlan",
    "Answer",
    "BatchStats",
    "ByteSize",
    "CacheScope",
    "Capabilities",
    "ChannelStats",
    "ChatPrompt",
    "ContextExcess",
    "Delta",
    "Engine",
    "Finished",
    "FollowedGrammar",
    "Generate",
    "Grammar",
    "Health",
    "ImageSource",
    "InfillPrompt",
    "Lease",
    "LoadWatch",
    "Loading",
    "LogitsProcessor",
    "MemoryStats",
    "ModelCard",
    "ModelEntry",
    "ModelFiles",
    "ModelManager",
    "ModelOptions",
    "ModelUnusable",
    "PairPrompt",
    "Problem",
    "RequestFailed",
    "Runtime",
    "Sampling",
    "SelfCheck",
    "ServerSettings",
    "Settings",
    "SettingsInvalid",
    "TextPrompt",
    "Timeouts",
    "TokenLogprobs",
    "TokenPrompt",
    "Tokenizer",
    "prepare_process",
    "run_models",
    "run_runtime",
]
