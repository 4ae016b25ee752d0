"""GEMMs in 8 or 4 bits: what users choose, which weights have them, and the ranks over which scales agree."""

from megalight.parallel.precision.apply import apply_low_precision as apply_low_precision
from megalight.parallel.precision.apply import check_low_precision as check_low_precision
from megalight.parallel.precision.apply import options_of_part as options_of_part
from megalight.parallel.precision.apply import remove_low_precision as remove_low_precision
from megalight.parallel.precision.options import LowPrecisionOptions as LowPrecisionOptions
