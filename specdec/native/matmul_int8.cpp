#include "integer_products.h"

namespace specdec {

void multiply_int8(const Call& call) { for_kind(call.matrix.kind, IntegerWork<1>{call}); }

}  // namespace specdec
