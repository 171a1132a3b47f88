from .conversion import Conversion as Conversion
from .conversion import LayerReport as LayerReport
from .conversion import convert_model as convert_model
from .conversion import convert_rank as convert_rank
from .shards import convert_shards as convert_shards
