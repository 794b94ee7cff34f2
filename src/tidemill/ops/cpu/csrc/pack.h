// From a file's weight formats to packed panels.
#pragma once

#include <cstdint>

#include "packed.h"

namespace tidemill {

// The file formats, by their GGUF names. (Layouts: ggml's quantization blocks.)
enum class FileFormat { f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k };

// What holds the file format without loss, or nearly so: q6_k's 16-column scales become one 8-bit
// affine code per 32 columns, and f16 and f32 round to bf16.
Format packed_format(FileFormat format);

// Bytes of one row of `columns` in the file.
int64_t row_bytes(FileFormat format, int64_t columns);

// Packs rows `from` … `end` of `data` (in the file's format, `features` columns a row) as the rows
// `first + from` … of `to`, whose memory starts out as zeros. `to.format` may be wider than the
// file's own: u8 takes 4-bit codes as they are, bf16 takes anything. Columns beyond `features`
// stay zero. Rows of one panel must not be packed by two threads at once.
void pack_rows(FileFormat format, const uint8_t* data, int64_t features, int64_t from, int64_t end,
               int64_t first, const PackedWeight& to);

}  // namespace tidemill
