#include "integer_products.h"

namespace specdec {

void multiply_int16(const Call& call) { for_kind(call.matrix.kind, IntegerWork<2>{call}); }

}  // namespace specdec
