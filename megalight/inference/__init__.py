"""Generation: sampling, a cache, and text generation from a checkpoint."""

from megalight.inference.blocks import BlockPool as BlockPool
from megalight.inference.cache import Cache as Cache
from megalight.inference.engine import DynamicEngine as DynamicEngine
from megalight.inference.generate import generate as generate
from megalight.inference.generate import stream as stream
from megalight.inference.parallel import ParallelGPT as ParallelGPT
from megalight.inference.passes import EngineStep as EngineStep
from megalight.inference.request_record import RequestRecord as RequestRecord
from megalight.inference.sampling import SamplingParams as SamplingParams
from megalight.inference.sampling import sample as sample
from megalight.inference.scheduler import Completion as Completion
from megalight.inference.text import TextGenerator as TextGenerator
from megalight.inference.text import load_divided as load_divided
from megalight.inference.text import load_model as load_model
from megalight.inference.text_requests import TextCompletion as TextCompletion
from megalight.inference.text_requests import TextRequest as TextRequest
