// What one thread of a GPU does for an edge, done for each edge in turn.
#include "triangles.h"

using fxopt::Oriented;
using fxopt::Products;

extern "C" void count(const Oriented* graph, int64_t edges, int64_t* counts) {
  for (int64_t edge = 0; edge < edges; ++edge) counts[edge] = fxopt::count_triangles(*graph, edge);
}

extern "C" void fill(const Oriented* graph, int64_t edges, const int64_t* places, int64_t total, int64_t* found) {
  for (int64_t edge = 0; edge < edges; ++edge) fxopt::write_triangles(*graph, edge, places[edge], total, found);
}

extern "C" void products(const Oriented* graph, int64_t edges, const Products* tables) {
  for (int64_t edge = 0; edge < edges; ++edge)
    for (int64_t channel = 0; channel < tables->channels; ++channel)
      fxopt::add_products(*graph, *tables, edge, channel);
}

extern "C" int aoti_torch_get_current_cuda_stream(int, void**) { return 1; }  // a torch without CUDA lacks it
