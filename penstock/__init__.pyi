from penstock.gateway.client import Client as Client
from penstock.gateway.sync_client import SyncClient as SyncClient
from penstock.schemas.pooling import PoolingParams as PoolingParams
from penstock.schemas.sampling import SamplingParams as SamplingParams
from penstock.worker.llm import LLM as LLM
from penstock.worker.outlines_model import OutlinesModel as OutlinesModel
